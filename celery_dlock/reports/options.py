"""The options of a singleton task in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..options.lock_options import LockOptions

__all__ = ["NOT_SHOWN", "option_lines"]

_CONFLICT: Final = {
    "skip": "a call whose lock is held is skipped",
    "retry": "a call whose lock is held is tried again later",
    "queue": "a call whose lock is held waits in the queue",
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
#: Options that have sentences of their own, or a part of one.
_IN_SENTENCES: Final = frozenset((
    "key", "scope", "limit", "wait", "on_conflict", "debounce", "keep_on_retry", "unique", "once_per",
    "after_crash",
))  # fmt: skip
#: Options that operators do not need. ``skip_result`` is a result, which may be secret.
NOT_SHOWN: Final = frozenset(("skip_result",))


def option_lines(options: LockOptions) -> list[str]:
    """Return the options of a task as sentences for operators. An option without a sentence is shown by its name."""
    return list(_lines(options))


def _lines(options: LockOptions) -> Iterator[str]:
    shared = ", shared with other tasks" if options.scope == "shared" else ""
    yield f"the lock name is made of {_key(options.key)}{shared}"
    if options.limit > 1:
        yield f"up to {options.limit} calls of one lock name run at once"
    yield from _conflict(options)
    if options.keep_on_retry:
        yield "a retry keeps the lock"
    if options.unique:
        yield _UNIQUE.get(options.unique, f"unique is {options.unique}")
    if options.once_per is not None:
        yield f"{_once(options.once_per)}; {_CRASH.get(options.after_crash, '')}"
    for name in options.names():
        if name not in _IN_SENTENCES | NOT_SHOWN and _is_chosen(options, name):
            yield f"{name} is {_shown(getattr(options, name))}"


def _conflict(options: LockOptions) -> Iterator[str]:
    yield _CONFLICT.get(options.on_conflict, f"on_conflict is {options.on_conflict}")
    if options.wait:
        yield f"before that, it waits in its worker slot for {_shown(options.wait)}"
    if options.debounce is not None:
        wait, longest = (ms / 1000 for ms in options.debounce_ms)
        yield f"a call waits until no newer call has come for {wait:g} s, and at most {longest:g} s"


def _once(period: object) -> str:
    if period == "tick":
        return "it runs once for each due time of its schedule entry"
    return f"a name stays used for {'ten years' if period == 'forever' else _shown(period)} after a success"


def _is_chosen(options: LockOptions, name: str) -> bool:
    """Return whether the author chose the value. A ttl of 30 s may be chosen too, against the setting ``dlock_ttl``."""
    value, default = getattr(options, name), options.default(name)
    return value is not default if name == "ttl" else bool(value != default)


def _key(key: object) -> str:
    if key is None:
        return "all arguments"
    if isinstance(key, str):
        return f"the template {key!r}"
    if callable(key):
        return "the text that a function of the task returns"
    return f"the arguments {', '.join(map(str, key))}" if isinstance(key, list | tuple) else "some arguments"


def _shown(value: object) -> str:
    return f"{value:g} s" if isinstance(value, float) else str(value)  # every float is a duration
