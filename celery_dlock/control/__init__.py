"""The operators' API: the state of every lock name, and the actions that free, hold and settle it.

Nothing else reads the store for operators: the command line, metrics and every other surface use
:class:`LockControl`.
"""

from __future__ import annotations

from ..store.operator_model import (
    AuditRecord,
    ClaimView,
    DeadLetter,
    HolderView,
    LockView,
    Page,
    RunView,
    State,
    Waiter,
    Waiting,
)
from .explanation import Explanation
from .lock_control import ActionRefused, LockControl
from .summary import Counts, Health
from .ticks import TickView
from .workers import HeldLease, Workers, WorkerView

__all__ = [
    "ActionRefused",
    "AuditRecord",
    "ClaimView",
    "Counts",
    "DeadLetter",
    "Explanation",
    "Health",
    "HeldLease",
    "HolderView",
    "LockControl",
    "LockView",
    "Page",
    "RunView",
    "State",
    "TickView",
    "Waiter",
    "Waiting",
    "WorkerView",
    "Workers",
]
