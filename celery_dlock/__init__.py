"""celery-dlock: Celery tasks that run once at a time across every worker."""

from __future__ import annotations

from . import signals
from .decorator import singleton_task
from .errors import DLockError, InvalidLockOptions, LockHeld, LockLost, StoreUnavailable
from .lease import Lease
from .lock import Lock
from .options import LockOptions
from .task import SingletonTask

__all__ = [
    "DLockError",
    "InvalidLockOptions",
    "Lease",
    "Lock",
    "LockHeld",
    "LockLost",
    "LockOptions",
    "SingletonTask",
    "StoreUnavailable",
    "signals",
    "singleton_task",
]
