"""celery-dlock: Celery tasks that run once at a time across every worker."""

from __future__ import annotations

from . import signals
from .errors import (
    DLockError,
    GuardRefused,
    InvalidLockOptions,
    InvalidTick,
    LockHeld,
    LockLost,
    NameUsed,
    StoreUnavailable,
    UnknownOutcome,
)
from .lock import Lock
from .locking.lease import Lease
from .messaging.results import CallSkipped, Replaced
from .options.lock_options import LockOptions
from .task import app_check  # noqa: F401  # connects to a worker's start
from .task.base import SingletonTask
from .task.decorator import singleton_task

__all__ = [
    "CallSkipped",
    "DLockError",
    "GuardRefused",
    "InvalidLockOptions",
    "InvalidTick",
    "Lease",
    "Lock",
    "LockHeld",
    "LockLost",
    "LockOptions",
    "NameUsed",
    "Replaced",
    "SingletonTask",
    "StoreUnavailable",
    "UnknownOutcome",
    "signals",
    "singleton_task",
]
