"""The settings of an app, read from ``app.conf`` once and checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from kombu.transport import get_transport_cls

from ..errors import InvalidLockOptions, NoLockStore
from ..options.durability import PRIMARY, Durability, check_timeout
from ..options.durability import shown as shown_durability
from ..options.permissions import Permissions
from ..store.features import Features, features_of
from ..store.location import StoreLocation, shown
from ..utils.text import did_you_mean
from .celery_connections import location_from_broker, location_from_result_backend
from .locations import locations_from_settings
from .settings_table import SETTINGS

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

    A field has the name of its setting without ``dlock_``. ``settings_table`` describes the settings and their
    defaults. Only fields that differ from a setting are described here. Durations are seconds.
    """

    locations: tuple[StoreLocation, ...]
    """The locations from ``dlock_url`` and ``dlock_transport_options``; several for Redlock.

    If ``dlock_url`` is not set: the broker's server, or else the result backend's.
    """

    prefix: str
    ttl: float
    timeout: float
    grant_timeout: float
    grant_attempts: int
    doubtful_after: float | None
    """If a delivery is unacknowledged for this long, a Redis broker may have delivered its message again.

    A delivery that takes longer than this to end leaves a done mark, so that the second delivery does not run. The
    time is a little shorter than the broker's ``visibility_timeout``. None for brokers without one.
    """

    durability: Durability
    run_dir: str | None
    quarantine: float | None
    broker: str | None
    metrics_port: tuple[str, int] | None
    opentelemetry: bool

    @property
    def features(self) -> Features:
        """The features of the store."""
        return features_of([one.kind for one in self.locations])

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
            alike = _REMOVED.get(unknown[0].lower()) or did_you_mean(unknown[0].lower(), _KNOWN, "dlock_")
            raise InvalidLockOptions(f"unknown setting {unknown[0]!r}{alike}; all settings: docs/reference/settings.md")
        permissions_of(app)
        plain = {name: _value(app, setting) for name in _FIELDS if (setting := f"dlock_{name}") in SETTINGS}
        settings = cls(locations=_locations(app), doubtful_after=_doubtful_after(app), **plain)
        _check_durability(settings)
        return settings


#: Settings of drafts of this library, and what replaces them.
_REMOVED: Final = {
    "dlock_breaker_reset": " (removed: a store that timed out is always skipped for 2 s)",
    "dlock_failover_quarantine": " (removed: use dlock_quarantine)",
    "dlock_restart_delay": " (removed: use dlock_quarantine)",
}
_FIELDS = tuple(field.name for field in fields(Settings))


def _check_durability(settings: Settings) -> None:
    own = settings.durability
    if own != PRIMARY:
        settings.features.require("durability", f"invalid dlock_durability={shown_durability(own)}", "'primary'")
    if settings.quarantine:
        settings.features.require("quarantine", f"invalid dlock_quarantine={settings.quarantine:g}", "None")
    check_timeout(own, settings.timeout)


def permissions_of(app: Celery) -> Permissions:
    """Read the options that messages may choose. This needs no lock store.

    Raises:
        InvalidLockOptions: ``dlock_call_options`` or ``dlock_ttl`` is invalid.
    """
    return Permissions.of(_value(app, "dlock_call_options"), _value(app, "dlock_ttl"))


def _value(app: Celery, name: str) -> Any:
    setting = SETTINGS[name]
    return setting.value(name, app.conf.get(name, setting.default))


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


def _locations(app: Celery) -> tuple[StoreLocation, ...]:
    own, options = _value(app, "dlock_url"), _value(app, "dlock_transport_options")
    if own is not None:
        return locations_from_settings(own, options or {})
    if options:
        raise InvalidLockOptions("dlock_transport_options needs dlock_url, which is not set: set dlock_url as well")
    location = location_from_broker(app) or location_from_result_backend(app)
    if location is not None:
        return (location,)
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
    # The visibility timeout begins before this worker receives the message, and another worker's clock measures it. So
    # return a shorter time. If it is too short, the only cost is a done mark that is not needed.
    return max(0.0, visibility - max(2.0, visibility / 10))
