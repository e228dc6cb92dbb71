"""The options of a singleton task in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..options.lock_options import LockOptions

__all__ = ["option_lines"]

_CONFLICT: Final = {
    "skip": "a call whose lock is held is skipped",
    "retry": "a call whose lock is held is tried again later",
    "queue": "a call whose lock is held waits in the queue",
    "wait": "a call whose lock is held waits in its worker slot",
    "raise": "a call whose lock is held fails",
    "replace": "a newer call stops the running one and runs after it",
}
_UNIQUE: Final = {
    "queued": "a second call is rejected until the first one starts",
    "queued+running": "a second call is rejected until the first one ends",
}
_CRASH: Final = {
    "run": "after a crash the next call runs",
    "hold": "after a crash calls fail until the outcome is settled",
}
#: Options whose value is shown only if it is not the default.
_OTHERS: Final = (
    "ttl", "min_hold", "max_hold", "retry_limit", "wait_timeout", "after_wait", "queue_limit", "queue_overflow",
    "stop", "stop_grace", "replace_max", "on_duplicate", "on_used", "misfire_grace", "on_lost", "after_lost",
    "on_store_error", "durability",
)  # fmt: skip


def option_lines(options: LockOptions) -> list[str]:
    """Return the options of a task as sentences for people. They show no result of the task (``skip_result``)."""
    return list(_lines(options))


def _lines(options: LockOptions) -> Iterator[str]:
    shared = ", shared with other tasks" if options.scope == "shared" else ""
    yield f"the lock name is made of {_key(options.key)}{shared}"
    yield _CONFLICT.get(options.on_conflict, f"on_conflict is {options.on_conflict}")
    if options.debounce is not None:
        wait, longest = (ms / 1000 for ms in options.debounce_ms)
        yield f"a call waits until no newer call has come for {wait:g} s, and at most {longest:g} s"
    if options.keep_on_retry:
        yield "a retry keeps the lock"
    if options.unique:
        yield _UNIQUE.get(options.unique, f"unique is {options.unique}")
    if options.once_per == "tick":
        yield f"it runs once for each due time of its schedule entry; {_CRASH.get(options.after_crash, '')}"
    elif options.once_per is not None:
        period = "ten years" if options.once_per == "forever" else f"{_shown(options.once_per)} s"
        yield f"a name stays used for {period} after a success; {_CRASH.get(options.after_crash, '')}"
    for name in _OTHERS:
        value = getattr(options, name)
        if value != options.default(name):
            yield f"{name} is {_shown(value)}"


def _key(key: object) -> str:
    if key is None:
        return "all arguments"
    if isinstance(key, str):
        return f"the template {key!r}"
    if callable(key):
        return "the text that a function of the task returns"
    return f"the arguments {', '.join(map(str, key))}" if isinstance(key, list | tuple) else "some arguments"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
