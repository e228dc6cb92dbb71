"""The options in words, for operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from .values import DEFAULT_TTL

if TYPE_CHECKING:
    from .lock_options import LockOptions

__all__ = [
    "CONFLICT", "CRASH", "ONCE_PER", "ON_USED", "OVERFLOW", "STOP", "STORE_ERROR", "UNIQUE", "Words", "debounce", "key",
    "shown", "ttl",
]  # fmt: skip

#: The sentence about a chosen value, with ``{}`` for it. Or the sentences of some values, which may be the default, and
#: under "" that of every other chosen value. Or a function that returns the sentence, or "".
Words = str | Mapping[str, str] | Callable[["LockOptions"], str]

CONFLICT: Final = {
    "skip": "a call whose lock is held is skipped",
    "retry": "a call whose lock is held is tried again later",
    "queue": "a call whose lock is held waits in the queue",
    "raise": "a call whose lock is held fails",
    "replace": "a newer call stops the running one and runs after it",
}
OVERFLOW: Final = {
    "skip": "a call that finds the queue full is skipped",
    "drop_oldest": "a call that finds the queue full removes the oldest waiter",
}
STOP: Final = {
    "ask": "a running call learns of a newer one only from lease.ensure()",
    "": "a running call that a newer one stops is killed if it goes on for {}",
}
UNIQUE: Final = {
    "queued": "a second call is rejected until the first one starts",
    "queued+running": "a second call is rejected until the first one ends",
}
ONCE_PER: Final = {
    "tick": "it runs once for each due time of its schedule entry",
    "forever": "a name stays used for ten years after a success",
    "": "a name stays used for {} after a success",
}
ON_USED: Final = {
    "return": "a call of a used name returns the result of the first run",
    "raise": "a call of a used name fails",
}
CRASH: Final = {
    "run": "after a crash the next call runs",
    "hold": "after a crash calls fail until the outcome is settled",
}
STORE_ERROR: Final = {
    "fail": "without the lock store, a call fails",
    "run": "without the lock store, a call runs without the lock",
    "local": "without the lock store, a call runs with a lock on its machine only",
}


def key(options: LockOptions) -> str:
    """Return the sentence about the key, which may be the default."""
    value = options.key
    if value is None:
        made_of = "all arguments"
    elif isinstance(value, str):
        made_of = f"the template {value!r}"
    elif callable(value):
        made_of = "the text that a function of the task returns"
    else:
        made_of = f"the arguments {', '.join(value)}"
    return f"the lock name is made of {made_of}"


def ttl(options: LockOptions) -> str:
    """Return the sentence about a chosen ttl. A ttl of 30 s may be chosen too, against the setting ``dlock_ttl``."""
    return "" if options.ttl is DEFAULT_TTL else f"the lock expires {shown(options.ttl)} after its last renewal"


def debounce(options: LockOptions) -> str:
    """Return the sentence about the time that a call waits for newer ones."""
    wait, longest = (ms / 1000 for ms in options.debounce_ms)
    return f"a call waits until no newer call has come for {wait:g} s, and at most {longest:g} s" if wait else ""


def shown(value: object) -> str:
    """Return a value as a part of a sentence."""
    return f"{value:g} s" if isinstance(value, float) else str(value)  # every float is a duration
