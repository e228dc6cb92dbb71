"""What a task's author may choose, checked when it is chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

from .errors import InvalidLockOptions

__all__ = ["DEFAULT_TTL", "POLICIES", "UNSET", "LockOptions", "as_seconds", "ttl_seconds"]

POLICIES: Final = ("skip", "retry", "queue", "wait", "raise")
#: Policies that the design names and this version does not carry out yet.
_COMING: Final = ("replace",)
OVERFLOW: Final = ("raise", "skip", "drop_oldest", "keep_latest")
AFTER_WAIT: Final = ("raise", "skip", "retry")
SCOPES: Final = ("task", "shared")

#: The default ttl is one particular object, so that ``dlock_ttl`` can apply where the author wrote none.
DEFAULT_TTL: Final[float] = float("30")
MIN_TTL: Final = 1.0
MAX_SECONDS: Final = 366 * 24 * 3600.0


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"


#: ``skip_result`` may be any value, None too; this one means that none was given.
UNSET: Final = _Unset()

Key = str | Sequence[str] | Callable[..., str] | None
Seconds = float | timedelta


@dataclass(frozen=True, kw_only=True)
class LockOptions:
    """How a task is locked. Every field is checked here; a wrong one raises :class:`InvalidLockOptions`.

    Args:
        key: What is locked: None for all bound arguments; a ``str.format`` template over argument names
            (``"sms:{user_id}"``); a sequence of argument names; or a callable taking the call's arguments and
            returning a non-empty string.
        scope: ``"task"`` keeps the key to this task; with ``"shared"`` every task and ``Lock`` that names the same
            key excludes the others.
        ttl: Seconds (or a ``timedelta``), at least 1, that a lock outlives its last renewal. The worker renews at a
            third of it, so it bounds how long a dead host keeps a lock, not how long a body may run. Default: 30,
            or the app's ``dlock_ttl``.
        on_conflict: What happens to a call that meets a held lock: ``"skip"``, ``"retry"``, ``"queue"``, ``"wait"``,
            ``"raise"``.
        skip_result: With it, a skipped call ends SUCCESS with this value and its chain goes on.
        retry_delay: Seconds before the first new try under ``retry``; doubled each time, jittered.
        retry_delay_max: The longest such delay, in seconds.
        retry_limit: Most tries before the call fails with ``LockHeld``; None: no limit.
        wait_timeout: Seconds that ``wait`` blocks in the worker slot at most.
        after_wait: What then happens: ``"raise"``, ``"skip"`` or ``"retry"``.
        queue_limit: Most messages that wait for one lock under ``queue``; None: any number.
        queue_overflow: What happens to the next one: ``"raise"`` fails it with ``LockHeld``, ``"skip"`` skips it,
            ``"drop_oldest"`` ends the oldest waiter REVOKED, ``"keep_latest"`` lets only the newest call wait.
        once_per: Seconds (or a ``timedelta``) that the name stays used after a successful body; None: not at all.
    """

    key: Key = None
    scope: Literal["task", "shared"] = "task"
    ttl: Seconds = DEFAULT_TTL
    on_conflict: str = "skip"
    skip_result: Any = UNSET
    retry_delay: Seconds = 1.0
    retry_delay_max: Seconds = 60.0
    retry_limit: int | None = None
    wait_timeout: Seconds = 10.0
    after_wait: str = "raise"
    queue_limit: int | None = None
    queue_overflow: str = "raise"
    once_per: Seconds | None = None

    def __post_init__(self) -> None:
        self._check_key()
        _one_of("scope", self.scope, SCOPES)
        if self.scope == "shared" and self.key is None:
            raise _wrong(
                "scope", self.scope, "'task', or 'shared' together with key=: without a key there is no name to share"
            )
        if self.on_conflict in _COMING:
            raise _wrong(
                "on_conflict", self.on_conflict, f"{_listed(POLICIES)}; {self.on_conflict!r} is not available yet"
            )
        _one_of("on_conflict", self.on_conflict, POLICIES)
        _one_of("after_wait", self.after_wait, AFTER_WAIT)
        if self.ttl is not DEFAULT_TTL:
            self._set("ttl", ttl_seconds("ttl", self.ttl))
        self._set("retry_delay", _seconds("retry_delay", self.retry_delay, least=0.01))
        self._set("retry_delay_max", _seconds("retry_delay_max", self.retry_delay_max, least=0.01))
        if as_seconds(self.retry_delay_max) < as_seconds(self.retry_delay):
            raise _wrong("retry_delay_max", self.retry_delay_max, f"at least retry_delay ({self.retry_delay})")
        limit: object = self.retry_limit
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise _wrong("retry_limit", limit, "None or a whole number of at least 0")
        self._set("wait_timeout", _seconds("wait_timeout", self.wait_timeout, least=0.0))
        self._check_queue()
        if self.once_per is not None:
            self._set("once_per", _seconds("once_per", self.once_per, least=0.001))

    @property
    def most_waiting(self) -> int:
        """Waiters allowed per lock name; 0: any number."""
        return 1 if self.queue_overflow == "keep_latest" else self.queue_limit or 0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Every option's name."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @property
    def skips_with_result(self) -> bool:
        return self.skip_result is not UNSET

    def _check_key(self) -> None:
        key = self.key
        if key is None or callable(key):
            return
        if isinstance(key, str):
            if not key:
                raise _wrong("key", key, _KEYS)
            return
        given: object = key  # whatever the annotation says, anything may have been given
        if not isinstance(given, list | tuple) or not given or not all(isinstance(name, str) for name in given):
            raise _wrong("key", key, _KEYS)
        self._set("key", tuple(given))

    def _check_queue(self) -> None:
        limit: object = self.queue_limit
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise _wrong("queue_limit", limit, "None or a whole number of at least 1")
        _one_of("queue_overflow", self.queue_overflow, OVERFLOW)
        if self.on_conflict != "queue":
            for option, value, unset in (
                ("queue_limit", limit, None),
                ("queue_overflow", self.queue_overflow, "raise"),
            ):
                if value != unset:
                    raise _wrong(option, value, f"{unset!r} without on_conflict='queue'")
        if self.queue_overflow == "keep_latest" and limit not in (None, 1):
            raise _wrong("queue_limit", limit, "None or 1 under queue_overflow='keep_latest'")
        if self.queue_overflow in ("skip", "drop_oldest") and limit is None:
            raise _wrong("queue_overflow", self.queue_overflow, "'raise' or 'keep_latest' without a queue_limit")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way of a frozen dataclass to normalise its own fields


_KEYS = "None, a non-empty template such as 'sms:{user_id}', a non-empty sequence of argument names, or a callable"


def as_seconds(value: Seconds) -> float:
    """A duration that was checked, in seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def ttl_seconds(option: str, value: object) -> float:
    """A ttl in seconds, or the error that says what is allowed."""
    return _seconds(option, value, least=MIN_TTL)


def _seconds(option: str, value: object, *, least: float) -> float:
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise _wrong(option, value, f"seconds (int, float or timedelta) of at least {least:g}")
    if math.isnan(seconds) or not least <= seconds <= MAX_SECONDS:
        raise _wrong(option, value, f"seconds from {least:g} to {MAX_SECONDS:.10g}")
    return seconds


def _one_of(option: str, value: object, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise _wrong(option, value, _listed(allowed))


def _listed(allowed: Sequence[str]) -> str:
    return "one of " + ", ".join(map(repr, allowed))


def _wrong(option: str, value: object, allowed: str) -> InvalidLockOptions:
    return InvalidLockOptions(f"{option}={value!r} is not allowed; allowed: {allowed}")
