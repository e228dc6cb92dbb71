"""Options of other lock libraries and of drafts of this one, with their equivalents here, for errors."""

from __future__ import annotations

from typing import Final

__all__ = ["UNMISTAKABLE", "equivalent"]

_TIMES: Final = (
    "remove it, because the lock of a running task is renewed; "
    "set max_hold for a body that hangs, or queued_ttl for a lost message"
)
_KEY: Final = "use key=[...] with unique='queued+running'"
_WAIT: Final = "use wait=<seconds>"
_EQUIVALENTS: Final = {
    # celery-once: keys of its dict `once`
    "once": "use unique='queued+running'",
    "keys": _KEY,
    "graceful": "remove it, because on_duplicate='return' is the default",
    "unlock_before_run": "use unique='queued' with on_conflict='retry'",
    "timeout": _TIMES,
    # celery-singleton
    "unique_on": _KEY,
    "raise_on_duplicate": "use on_duplicate='raise' with unique='queued+running'",
    "lock_expiry": _TIMES,
    # redis-py's Lock
    "lock_timeout": _TIMES,
    "lock_ttl": "use ttl",
    "lock_key": "use key",
    "lock_name": "use key",
    "blocking": _WAIT,
    "blocking_timeout": _WAIT,
}
#: Options of drafts of this library.
_REMOVED: Final = {
    "wait_timeout": "use wait=<seconds>",
    "after_wait": "use on_conflict, which applies after wait=<seconds>",
    "debounce_max": "use a pair, debounce=(seconds, longest)",
    "stop_grace": "use stop=<seconds>",
    "replace_max": "it is always one hour",
    "durability": "use the setting dlock_durability",
    "after_lost": "use Celery's autoretry_for=(LockLost,)",
}
#: Names that mean an option of another lock library wherever they occur. Others are ambiguous: kombu has a ``timeout``.
UNMISTAKABLE: Final = ("once", "unique_on", "raise_on_duplicate", "lock_expiry", "unlock_before_run")


def equivalent(name: object) -> str:
    """Return what to write instead of an option that does not exist here, for an error; "" if it is unknown."""
    if not isinstance(name, str):
        return ""
    if name in _REMOVED:
        return f" (removed: {_REMOVED[name]})"
    found = _EQUIVALENTS.get(name)
    return f" (of another library: {found})" if found else ""
