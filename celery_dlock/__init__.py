"""celery-dlock: Celery tasks that run once at a time across every worker."""

from __future__ import annotations

from . import (
    forgotten,  # noqa: F401  # listens for a worker's start
    signals,
)
from .decorator import singleton_task
from .errors import (
    DLockError,
    InvalidLockOptions,
    InvalidTick,
    LockHeld,
    LockLost,
    NameUsed,
    StoreUnavailable,
    UnknownOutcome,
)
from .lease import Lease
from .lock import Lock
from .options import LockOptions
from .task import SingletonTask

__all__ = [
    "DLockError",
    "InvalidLockOptions",
    "InvalidTick",
    "Lease",
    "Lock",
    "LockHeld",
    "LockLost",
    "LockOptions",
    "NameUsed",
    "SingletonTask",
    "StoreUnavailable",
    "UnknownOutcome",
    "signals",
    "singleton_task",
]
