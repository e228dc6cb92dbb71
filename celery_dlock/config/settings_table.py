"""The settings of an app: default, allowed values and meaning of each, written once.

:class:`~celery_dlock.config.settings.Settings` reads ``app.conf`` by this table, and ``tools/reference.py`` writes
``docs/reference/settings.md`` from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ..options.durability import durability_of
from ..options.durations import MAX_SECONDS, MIN_TTL, seconds_within
from ..options.error_texts import invalid_value
from ..options.values import DEFAULT_TTL
from ..store.location import shown

__all__ = ["SETTINGS", "Setting"]

_MAX_PORT: Final = 65535


class _Values(NamedTuple):
    """The values that a setting may have.

    Args:
        text: The values, as the documentation shows them.
        check: Gets the name of the setting and a value, and returns the value to use. Raises
            :exc:`~celery_dlock.InvalidLockOptions`.
    """

    text: str
    check: Callable[[str, Any], Any]


class Setting(NamedTuple):
    """One setting.

    Args:
        default: The value of an app that does not set it. If it is None, or ``optional`` is True, the app may also
            set None.
        values: The allowed values.
        meaning: One paragraph. Its first sentence describes the value of the setting.
        default_text: The default as the documentation shows it; "" for the value itself.
        optional: Whether None stands for the default.
    """

    default: Any
    values: _Values
    meaning: str
    default_text: str = ""
    optional: bool = False

    def value(self, name: str, given: Any) -> Any:
        """Return the checked value of the setting.

        Args:
            name: The name of the setting.
            given: The value in ``app.conf``, or the default.

        Raises:
            InvalidLockOptions: The value is invalid.
        """
        if given is None and (self.optional or self.default is None):
            return self.default
        return self.values.check(name, given)


def _seconds(minimum: float, maximum: float = MAX_SECONDS) -> _Values:
    longest = "366 days" if maximum == MAX_SECONDS else f"{maximum:g} s"
    return _Values(f"{minimum:g} s to {longest}", lambda name, given: seconds_within(name, given, minimum, maximum))


def _prefix(name: str, given: Any) -> str:
    if not isinstance(given, str) or not given or any(c in "{}" or c.isspace() for c in given):
        raise invalid_value(name, given, "a non-empty text without braces or spaces")
    return given


def _switch(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise invalid_value(name, given, "True, or False to take no lock at all (for tests)")
    return given


def _count(name: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise invalid_value(name, given, "a whole number of at least 1")
    return given


def _broker(name: str, given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise invalid_value(name, given, "a non-empty text, the same in all apps of one broker")
    # Every parked message contains this text, so a URL must not show its password.
    return shown(given) if "://" in given else given


def _address(name: str, given: Any) -> tuple[str, int]:
    """Return the address to bind: a port alone is that of the loopback interface."""
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", given)
    number = int(port) if isinstance(port, str) and port.isdecimal() else port
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MAX_PORT:
        raise invalid_value(name, given, "a port, or 'host:port' such as '0.0.0.0:9808'")
    return host.strip("[]") or "127.0.0.1", number


def _directory(name: str, given: Any) -> str:
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    if not isinstance(path, str) or not os.path.isabs(path):  # noqa: PTH117  # a text, not a Path
        raise invalid_value(name, given, "the absolute path of a directory, the same in all workers of this machine")
    return path.rstrip("/") or "/"


def _checked_later(_name: str, given: Any) -> Any:
    """Return the value unchecked. Its reader checks it, because that needs other settings."""
    return given


SETTINGS: Final = {
    "dlock_url": Setting(
        None,
        _Values("a URL, or a list of URLs", _checked_later),
        "The lock store: the URL of one server, of sentinels, of a Cluster or of a database, or a list of servers for "
        "Redlock. "
        "``memory://``: the memory of this process, for tests.",
        "the broker's URL if that is Redis, else the result backend's",
    ),
    "dlock_transport_options": Setting(
        None,
        _Values("a dict", _checked_later),
        "What a URL cannot say: ``master_name``, ``sentinel_kwargs``, ``credential_provider``, ``ssl``.",
        "none",
    ),
    "dlock_prefix": Setting(
        "dlock", _Values("a text without braces and spaces", _prefix), "The start of every key in the lock store."
    ),
    "dlock_ttl": Setting(
        DEFAULT_TTL, _seconds(MIN_TTL), "The ttl in seconds of tasks and locks that set none.", optional=True
    ),
    "dlock_durability": Setting(
        "primary",
        _Values(
            '``"primary"``, ``{"replicas": n}``, ``{"fsync": "local"}`` or ``{"fsync": n}``; a dict may also have '
            '``"timeout": s``',
            durability_of,
        ),
        "The servers or disks that must confirm a write about a lock before it counts.",
    ),
    "dlock_enabled": Setting(
        True,  # noqa: FBT003  # the default of a setting
        _Values("``True`` or ``False``", _switch),
        "For tests: if it is ``False``, no call takes a lock and no store is needed.",
    ),
    "dlock_call_options": Setting(
        "bounded",
        _Values('``"bounded"``, ``"all"`` or a list of options', _checked_later),
        "The options that a message may choose: all within the task's bounds, all, or those in the list.",
        optional=True,
    ),
    "dlock_timeout": Setting(
        3.0,
        _seconds(0.05, 60.0),
        "Seconds that connecting to the store and each command may take. Renewals have shorter timeouts.",
    ),
    "dlock_run_dir": Setting(
        None,
        _Values("an absolute path", _directory),
        'The run directory: where the lock files of ``on_store_error="local"`` are.',
        "``celery-dlock-<uid>`` in the directory for temporary files",
    ),
    "dlock_quarantine": Setting(
        None,
        _seconds(0.0),
        "Seconds for which a server grants nothing new after it was started, emptied or promoted. Set the longest ttl, "
        "the same in all workers. 0: off.",
        "on a Redlock, the longest ttl of the app's tasks, at least ``dlock_ttl``; else 0",
    ),
    "dlock_grant_timeout": Setting(
        60.0,
        _seconds(MIN_TTL),
        "Seconds that a granted call has to start after its message was published, doubled with each failed grant.",
    ),
    "dlock_grant_attempts": Setting(
        5,
        _Values("a whole number of at least 1", _count),
        "Failed grants after which a parked message becomes a dead letter.",
    ),
    "dlock_broker": Setting(
        None,
        _Values("a text", _broker),
        "The broker's name in parked messages; the same in all apps of one broker.",
        "the broker's URL without user, password and options",
    ),
    "dlock_metrics_port": Setting(
        None,
        _Values("a port, or ``host:port``", _address),
        "Where each worker serves its metrics for Prometheus. A port alone is bound to 127.0.0.1; 0 is any free port.",
        "off",
    ),
    "dlock_opentelemetry": Setting(
        False,  # noqa: FBT003  # the default of a setting
        _Values("``True`` or ``False``", _switch),
        "Whether the current OpenTelemetry span shows what became of a call.",
    ),
}
"""The settings by name."""
