"""The settings of an app, read from ``app.conf`` once and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kombu.transport import get_transport_cls

from ..errors import InvalidLockOptions, NoLockStore
from ..options.durability import PRIMARY, Durability, check_timeout, durability_of
from ..options.durability import shown as shown_durability
from ..options.lock_options import DEFAULT_TTL
from ..options.permissions import Permissions
from ..options.validation import did_you_mean, invalid_value, seconds_within, ttl_seconds, unmet_requirement
from ..store.location import StoreLocation, shown
from .celery_connections import location_from_broker, location_from_result_backend
from .known_settings import SETTINGS
from .locations import locations_from_settings

if TYPE_CHECKING:
    from celery import Celery

__all__ = [
    "Settings",
    "permissions_of",
]

_KNOWN = tuple(sorted(SETTINGS))


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked values of an app's ``dlock_`` settings.

    A field has the name of its setting without ``dlock_``. ``known_settings`` describes the settings and their
    defaults. Only fields that differ from a setting are described here. Durations are seconds.
    """

    places: tuple[StoreLocation, ...]
    """The locations from ``dlock_url`` and ``dlock_transport_options``; several for Redlock.

    If ``dlock_url`` is not set: the broker's server, or else the result backend's.
    """

    prefix: str
    ttl: float
    timeout: float
    rest: float
    turn: float
    turn_tries: int
    doubtful_after: float | None
    """The age of an unacknowledged delivery from which a Redis broker may have delivered its message again.

    It comes from the broker's ``visibility_timeout``. None for brokers without one.
    """

    durability: Durability = PRIMARY
    failover_quarantine: float = 0.0
    restart_delay: float | None = None
    broker: str | None = None

    def confirmed_by(self, own: Durability | None, option: str = "durability") -> Durability:
        """Return the durability that each write of a lock must have.

        Args:
            own: The durability of its task, call or ``Lock``; None if that sets none.
            option: The name of the option in an error.

        Raises:
            InvalidLockOptions: The lock store of this app cannot confirm that durability.
        """
        if own is None:
            return self.durability
        if own != PRIMARY and len(self.places) > 1:
            raise InvalidLockOptions(
                f"invalid {option}={shown_durability(own)}: expected 'primary' on a Redlock, because its servers have "
                "no replicas"
            )
        check_timeout(option, own, self.timeout)
        return own

    @classmethod
    def of(cls, app: Celery) -> Settings:
        """Read and check the settings of ``app``.

        Raises:
            InvalidLockOptions: A ``dlock_`` setting is unknown or its value is invalid.
            NoLockStore: No setting names a Redis for the locks.
        """
        conf = app.conf
        unknown = sorted(key for key in _keys(conf) if key.lower().startswith("dlock_") and key not in _KNOWN)
        if unknown:
            alike = did_you_mean(unknown[0].lower(), _KNOWN, "dlock_")
            raise InvalidLockOptions(f"unknown setting {unknown[0]!r}{alike}; known are {', '.join(_KNOWN)}")
        prefix = conf.get("dlock_prefix", "dlock")
        if not isinstance(prefix, str) or not prefix or any(c in "{}" or c.isspace() for c in prefix):
            raise invalid_value("dlock_prefix", prefix, "a non-empty text without braces or spaces")
        ttl = conf.get("dlock_ttl")
        seconds = DEFAULT_TTL if ttl is None else ttl_seconds("dlock_ttl", ttl)
        timeout = seconds_within("dlock_timeout", conf.get("dlock_timeout", 3.0), 0.05, 60.0)
        rest = seconds_within("dlock_rest", conf.get("dlock_rest", 2.0), 0.0, 60.0)
        turn = ttl_seconds("dlock_turn", conf.get("dlock_turn", 60.0))
        tries = conf.get("dlock_turn_tries", 5)
        if not isinstance(tries, int) or isinstance(tries, bool) or tries < 1:
            raise invalid_value("dlock_turn_tries", tries, "a whole number of at least 1")
        permissions_of(app)
        settings = cls(_places(app), prefix, seconds, timeout, rest, turn, tries, _doubtful_after(app))
        durability = durability_of("dlock_durability", conf.get("dlock_durability", "primary"))
        quarantine, delay = _pauses(conf, redlock=len(settings.places) > 1)
        return replace(
            settings,
            durability=settings.confirmed_by(durability, "dlock_durability"),
            failover_quarantine=quarantine,
            restart_delay=delay,
            broker=_broker_name(conf.get("dlock_broker")),
        )


def permissions_of(app: Celery) -> Permissions:
    """Read the options that messages may choose. This needs no lock store.

    Raises:
        InvalidLockOptions: ``dlock_call_options`` or ``dlock_ttl`` is invalid.
    """
    conf: Any = app.conf
    ttl = conf.get("dlock_ttl")
    return Permissions.of(conf.get("dlock_call_options"), DEFAULT_TTL if ttl is None else ttl_seconds("dlock_ttl", ttl))


def _broker_name(given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given.strip():
        raise invalid_value("dlock_broker", given, "a non-empty text, the same in all apps of one broker")
    # Every parked message contains this text, so a URL must not show its password.
    return shown(given) if "://" in given else given


def _keys(conf: Any) -> set[str]:
    """Return the names of all settings of the app. Celery keeps unknown names in the user's own spelling."""
    # Read the names first: this loads the configuration, and only then the prefix is known.
    keys = {str(key) for layer in conf.maps for key in layer}
    prefix = getattr(conf, "prefix", None) or ""
    if not prefix:
        return keys
    ours = {key.removeprefix(prefix).lower() for key in keys if key.startswith(prefix)}
    # With a namespace, an upper-case name without its prefix is not a setting of Celery.
    return ours | {key for key in keys if not key.isupper()}


def _pauses(conf: Any, *, redlock: bool) -> tuple[float, float | None]:
    """Return ``dlock_failover_quarantine`` and ``dlock_restart_delay``. Only one of them applies to a store."""
    quarantine, delay = conf.get("dlock_failover_quarantine", 0.0), conf.get("dlock_restart_delay")
    quarantine = seconds_within("dlock_failover_quarantine", quarantine, 0.0)
    delay = None if delay is None else seconds_within("dlock_restart_delay", delay, 0.0)
    if redlock and quarantine:
        reason = "0 on a Redlock; set dlock_restart_delay instead"
        raise invalid_value("dlock_failover_quarantine", quarantine, reason)
    if delay and not redlock:
        raise unmet_requirement("dlock_restart_delay", delay, "a Redlock; set dlock_failover_quarantine instead")
    return quarantine, delay


def _places(app: Celery) -> tuple[StoreLocation, ...]:
    own, options = app.conf.get("dlock_url"), app.conf.get("dlock_transport_options")
    if own is not None:
        return locations_from_settings(own, options or {})
    if options:
        raise InvalidLockOptions("dlock_transport_options needs dlock_url, which is not set: set dlock_url as well")
    place = location_from_broker(app) or location_from_result_backend(app)
    if place is not None:
        return (place,)
    candidates = (_first(app.conf.broker_write_url), _first(app.conf.result_backend))
    seen = " and ".join(repr(shown(url)) for url in candidates if url)
    if not seen:
        raise NoLockStore(
            f"the app {app.main!r} has no dlock_url, no broker and no result backend: import the module of your Celery "
            "app before its tasks are called, or pass app= to the decorator or the Lock"
        )
    raise NoLockStore(
        f"dlock_url is not set, and neither the broker nor the result backend is a Redis ({seen}): set dlock_url, or "
        "dlock_enabled=False for tests that need no locks"
    )


def _first(urls: Any) -> str:
    if isinstance(urls, list | tuple):
        urls = urls[0] if urls else ""
    return str(urls or "").partition(";")[0]


def _doubtful_after(app: Celery) -> float | None:
    from kombu.transport.redis import Transport  # noqa: PLC0415  # importing celery_dlock loads no driver

    # The transport for Sentinel, and others, derive from that for Redis.
    if not issubclass(get_transport_cls(app.connection_for_write().transport_cls), Transport):  # type: ignore[arg-type]  # it is a class
        return None
    visibility = float((app.conf.broker_transport_options or {}).get("visibility_timeout", 3600))
    # Use a shorter limit than the visibility timeout: the broker counts it from an earlier moment, by another worker's
    # clock. A false alarm only costs one done mark.
    return max(0.0, visibility - max(2.0, visibility / 10))
