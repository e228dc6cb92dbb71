"""Which options cannot be had where locks are kept on several independent servers (Redlock)."""

from __future__ import annotations

from typing import Any, Final

from ..errors import InvalidLockOptions
from ..options.lock_options import LockOptions

__all__ = ["check_topology_support"]

_WHERE: Final = "where dlock_url names several servers (Redlock)"
_QUEUE: Final = f"{_WHERE}: none of them knows the order of the waiters; allowed: 'skip', 'retry', 'wait', 'raise'"
_CLAIMS: Final = f"{_WHERE}: they keep no claims of queued calls; allowed: None"


def check_topology_support(urls: Any, options: LockOptions | None, task: str | None) -> None:
    """Check a task's, or a call's, options against ``dlock_url``.

    Args:
        urls: That setting.
        options: The options; None for a call without a lock.
        task: The task's name.

    Raises:
        InvalidLockOptions: One of them cannot be had there.
    """
    if options is None or not isinstance(urls, list | tuple):
        return
    unfit = {
        "on_conflict": _QUEUE if options.on_conflict == "queue" else "",
        "unique": _CLAIMS if options.claims else "",
    }
    for option, why in unfit.items():
        if why:
            raise InvalidLockOptions(f"task {task!r}: {option}={getattr(options, option)!r} is not allowed {why}")
