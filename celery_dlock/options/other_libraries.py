"""The options of other lock libraries and their equivalents here, for the errors that a migration meets."""

from __future__ import annotations

from typing import Final

__all__ = ["UNMISTAKABLE", "equivalent"]

_TIMES: Final = (
    "none for a running task, whose lock is renewed; max_hold for a body that hangs, queued_ttl for a lost message"
)
_KEY: Final = "key=[...], with unique='queued+running'"
_WAIT: Final = "on_conflict='wait' with wait_timeout"
_EQUIVALENTS: Final = {
    # celery-once: keys of its dict `once`
    "once": "unique='queued+running'",
    "keys": _KEY,
    "graceful": "on_duplicate='return', the default",
    "unlock_before_run": "unique='queued', with on_conflict='retry'",
    "timeout": _TIMES,
    # celery-singleton
    "unique_on": _KEY,
    "raise_on_duplicate": "on_duplicate='raise', with unique='queued+running'",
    "lock_expiry": _TIMES,
    # redis-py's Lock
    "lock_timeout": _TIMES,
    "lock_ttl": "ttl",
    "lock_key": "key",
    "lock_name": "key",
    "blocking": _WAIT,
    "blocking_timeout": _WAIT,
}
#: Names that mean an option of another lock library wherever they occur. Others are ambiguous: kombu has a ``timeout``.
UNMISTAKABLE: Final = ("once", "unique_on", "raise_on_duplicate", "lock_expiry", "unlock_before_run")


def equivalent(name: object) -> str:
    """Return the equivalent of another library's option, for an error; "" if there is none."""
    found = _EQUIVALENTS.get(name) if isinstance(name, str) else None
    return f" (of another library; here: {found})" if found else ""
