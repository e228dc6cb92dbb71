"""Who holds: one delivery of one message, or one thread; carried along, so that its locks are reentrant."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Final

from ..keys.lock_name import LockName
from ..store.base import ReleaseRequest
from ..store.model import Requester
from .lease import Lease

__all__ = ["OwnerContext", "current_scope", "enter", "entered"]


_UNDONE: Final = ReleaseRequest(outcome_unknown=True, rolled_back=True)


class OwnerContext:
    """What one owner entered and has not left, and what it says of itself.

    Args:
        owner: A new one for each delivery, never a task id: the broker may deliver one message twice at once.
        requester: Who it is, as :class:`~celery_dlock.store.model.AcquireRequest` says it.
        task: The task's name, if it is an execution of one.
        task_id: Its id.
        outer: The scope of the same owner in which this one is nested (an ``apply()`` inside a body).
        delivered: It has a message, which can come back when the store answers again.
    """

    __slots__ = (
        "acquisition_numbers",
        "delivered",
        "entered",
        "held",
        "ident",
        "open_acquisitions",
        "own",
        "owner",
        "pid",
        "requester",
        "rollback",
        "task",
        "task_id",
    )

    def __init__(
        self,
        owner: str,
        requester: Requester,
        task: str | None = None,
        task_id: str | None = None,
        outer: OwnerContext | None = None,
        *,
        delivered: bool = False,
    ) -> None:
        self.owner = owner
        self.requester = requester
        self.task = task
        self.task_id = task_id
        self.delivered = delivered
        #: How an acquisition ends of which nobody knows whether it took place: its body has not begun.
        self.rollback = _UNDONE
        self.pid = os.getpid()
        self.ident = threading.get_ident()
        #: Acquisitions that were begun and have not ended, on record in ``entered`` or not.
        self.open_acquisitions: set[str] = set()
        self.entered: list[Lease] = []
        #: The entry of the execution itself, which no ``Lock`` may leave.
        self.own: Lease | None = None
        #: By lock client and lock name: what an entry may re-enter.
        self.held: dict[tuple[int, LockName], Lease] = outer.held if outer else {}
        self.acquisition_numbers: Iterator[int] = outer.acquisition_numbers if outer else itertools.count(1)

    def drop(self, lease: Lease) -> None:
        """Forget this scope's innermost entry of ``lease``."""
        if self.entered and self.entered[-1] is lease:
            self.entered.pop()
            return
        for index in reversed(range(len(self.entered))):
            if self.entered[index] is lease:
                del self.entered[index]
                return

    def next_acquisition(self) -> str:
        """Owner and number: what the store knows of one outermost entry."""
        acquisition = f"{self.owner}.{next(self.acquisition_numbers)}"
        self.open_acquisitions.add(acquisition)
        return acquisition


_scope: ContextVar[OwnerContext | None] = ContextVar("celery_dlock_scope", default=None)
#: By the class, because gevent may replace it after this import, and then greenlets must not share what threads had.
_threads: dict[type, threading.local] = {}


def current_scope(node: str) -> OwnerContext:
    """The running execution's scope; outside of one, the scope of this thread.

    A process that was forked from the owner's is another owner: both go on living. So is a thread to which the
    context was copied (``asyncio.to_thread``, a spawned greenlet): two of them would run at once as one owner.
    """
    scope = _scope.get()
    if scope is not None and scope.pid == os.getpid() and scope.ident == threading.get_ident():
        return scope
    thread = _threads.get(threading.local) or _threads.setdefault(threading.local, threading.local())
    own: OwnerContext | None = getattr(thread, "scope", None)
    if own is None or own.pid != os.getpid():
        own = thread.scope = OwnerContext(uuid.uuid4().hex, Requester.of(None, None, node, os.getpid()))
    return own


#: The scope that was entered last in this context, to be entered again after another.
entered: Final[Callable[[], OwnerContext | None]] = _scope.get
#: Make a scope, or None, the current one.
enter: Final[Callable[[OwnerContext | None], object]] = _scope.set
