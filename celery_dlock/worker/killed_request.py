"""The end of a call whose body the worker has killed because a newer call replaces it (``stop`` with seconds)."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated
from celery.worker.state import task_ready

from ..messaging.results import has_end, store_revoked, try_end
from ..task.stopped import report_stopped
from .ack_tracking import AckTrackingRequest

if TYPE_CHECKING:
    from celery.app.task import Context

    from ..task.base import SingletonTask
    from .stop_kill import KilledBody

__all__ = ["KillableRequest"]


class KillableRequest(AckTrackingRequest):
    """A request that ends REVOKED, and not as a crash, if the worker has killed its body."""

    # Attributes of Celery's own class that its stubs leave out.
    _already_cancelled: bool
    _already_revoked: bool
    _context: Context
    task: SingletonTask

    #: The body was killed, and this object has ended the call.
    _dlock_was_killed = False

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        killer = self._dlock_deliveries.body_killer
        # The broker delivers a cancelled message again. The mark of its stop request in the store then ends it.
        if not killer.knows(self.dlock_owner) or self._already_cancelled:
            if not self._dlock_was_killed:
                super().on_failure(exc_info, *args, **kwargs)
            return
        # Set this before the body is taken. Some pools call this in a thread of their own, beside `dlock_on_killed`.
        self._dlock_was_killed = True
        if (killed := killer.take(self.dlock_owner)) is not None:
            task_ready(self)
            if not self._already_revoked:
                self._dlock_end_killed(killed)

    def dlock_on_killed(self) -> None:
        """End the call now. Celery may notice the child's death only 5 s later.

        Before 5.7, Celery never notices it if it has lost the broker while the body ran.
        """
        if self._dlock_deliveries.body_killer.knows(self.dlock_owner) and not self._already_cancelled:
            try:
                raise Terminated(-signal.SIGKILL)  # noqa: TRY301  # ExceptionInfo reads the current exception
            except Terminated:
                self.on_failure(ExceptionInfo())

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001  # Celery's signature
        # The hard time limit may strike between the kill and the moment when Celery notices the child's death.
        if not self._dlock_was_killed:
            super().on_timeout(soft, timeout)

    def _dlock_end_killed(self, killed: KilledBody) -> None:
        """Store REVOKED for the call and its canvas, and acknowledge the message.

        If the end cannot be stored, a message that is acknowledged late is requeued. The mark of its stop request in
        the store ends its next delivery REVOKED. The end of any other message is tried again in another thread.
        """
        task, task_id, context = self.task, self.id, self._context
        error = report_stopped(task, task_id, self.dlock_owner, killed.name, killed.by)

        def store() -> None:
            # An earlier delivery may have stored its end, and died before it was acknowledged.
            if not has_end(task, task_id):
                store_revoked(task, context, error)

        stored = try_end(task, task_id, store, within=0, gives_up=False)
        if stored:
            self.send_event("task-revoked", terminated=True, signum=int(signal.SIGKILL), expired=False)
        elif task.acks_late:
            self.reject(requeue=True)
            return
        elif stored is None:
            self._dlock_deliveries.body_killer.ends.add(partial(try_end, task, task_id, store))
        self.acknowledge()
