"""The owner of locks: one delivery of one message, or one thread.

Its context lists the locks that it holds, so that it can re-enter them.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from ..keys.lock_name import LockName
from ..store.base import ReleaseRequest
from ..store.model import Requester
from .lease import Lease

if TYPE_CHECKING:
    from .client import LockClient

__all__ = ["OwnerContext", "current_context", "enter", "entered"]


_UNDONE: Final = ReleaseRequest(outcome_unknown=True, rolled_back=True)


class OwnerContext:
    """The identity of one owner, and the leases that it has entered and not left.

    Args:
        owner: An id that is new for each delivery. A task id is not enough: the broker may deliver a message twice.
        requester: The task, node and process that the store records for the owner.
        task: The name of the executed task; None outside any task.
        task_id: The id of that task; None outside any task.
        outer: For an execution without a message (``apply()``), the context of its caller, which has the same owner.
        delivered: Whether the owner has a message. If the store does not answer, the message can be republished.
    """

    #: The release request for an acquire that was interrupted or got no answer. The body has not begun.
    rollback = _UNDONE
    #: The lease of the running task itself. A ``Lock`` of the same name must not release it.
    own: Lease | None = None

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
        self.pid = os.getpid()
        self.ident = threading.get_ident()
        #: The acquisitions that have begun and not ended, each with its lock client. One without a lease in ``entered``
        #: was interrupted.
        self.open_acquisitions: dict[str, LockClient] = {}
        #: The leases that this owner has entered and not left, innermost last. A re-entered lease occurs several times.
        self.entered: list[Lease] = []
        #: The leases that can be re-entered, by lock client and lock name.
        self.held: dict[tuple[object, LockName], Lease]
        self.acquisition_numbers: Iterator[int]
        if outer is None:
            self.held, self.acquisition_numbers = {}, itertools.count(1)
        else:
            self.held, self.acquisition_numbers = outer.held, outer.acquisition_numbers

    def lease_of(self, client: object, name: LockName) -> Lease | None:
        """Return the lease of this name that can be re-entered; None if there is none.

        A nested task may know another ``limit`` of the name. On a seat of its own, it could wait for its own caller.
        """
        exact = self.held.get((client, name))
        return exact or next(
            (lease for (its_client, its), lease in self.held.items() if its_client is client and its.text == name.text),
            None,
        )

    def drop(self, lease: Lease) -> None:
        """Remove the innermost entry of ``lease``; do nothing if there is none."""
        entered = self.entered
        if entered and entered[-1] is lease:
            entered.pop()
            return
        for index in reversed(range(len(entered))):
            if entered[index] is lease:
                del entered[index]
                return

    def next_acquisition(self, client: LockClient) -> str:
        """Return a new acquisition id for this lock client: the owner and a number."""
        acquisition = f"{self.owner}.{next(self.acquisition_numbers)}"
        self.open_acquisitions[acquisition] = client
        return acquisition


_context: ContextVar[OwnerContext | None] = ContextVar("celery_dlock_owner_context", default=None)
#: The contexts outside of executions, by the class ``threading.local`` in use. gevent may replace that class after this
#: import. With an instance of the original class, all greenlets of a thread would share one owner.
_threads: dict[type, threading.local] = {}


def current_context(node: str) -> OwnerContext:
    """Return the context of the running execution or, outside of one, of this thread.

    A forked process is another owner than its parent, because both continue to run. A thread or greenlet to which the
    context was copied (``asyncio.to_thread``, for example) is another owner too. Otherwise two threads could hold one
    lock at once.
    """
    context = _context.get()
    if context is not None and context.pid == os.getpid() and context.ident == threading.get_ident():
        return context
    thread = _threads.get(threading.local) or _threads.setdefault(threading.local, threading.local())
    own: OwnerContext | None = getattr(thread, "context", None)
    if own is None or own.pid != os.getpid():
        own = thread.context = OwnerContext(uuid.uuid4().hex, Requester.of(None, None, node, os.getpid()))
    return own


#: Return the context of the running execution, or None. The caller restores it later with :func:`enter`.
entered: Final[Callable[[], OwnerContext | None]] = _context.get
#: Set the context of the running execution; None outside of one.
enter: Final[Callable[[OwnerContext | None], object]] = _context.set
