"""Acknowledgement tracking: whether the broker received the acknowledgement of a delivery.

If the acknowledgement was lost, the broker delivers the message again.
"""

from __future__ import annotations

import functools
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.worker.request import Request

from ..utils.log import log_fields, logger
from .completion_marker import channel_is_gone
from .delivery_registry import DeliveryRegistry

if TYPE_CHECKING:
    from celery import Celery

    from ..keys.key_spec import LockName
    from ..store.model import Identity

__all__ = ["AckTrackingRequest"]


class AckTrackingRequest(Request):
    """A request that records whether its acknowledgement was lost.

    Celery sends the acknowledgement in a later round of its event loop. If that fails, Celery only logs the error. Its
    callback there is ``message.ack_log_error``, which calls ``message.ack``. This class replaces ``message.ack`` and
    not the callback: at the shutdown of a prefork pool, Celery runs only callbacks of that name
    (``celery.concurrency.prefork``).
    """

    # Attributes of Celery's own class that its stubs leave out.
    _app: Celery
    _connection_errors: tuple[type[BaseException], ...]
    _message: Any

    if TYPE_CHECKING:  # added by the subclass
        dlock_owner: str
        dlock_number: int
        dlock_delivered: float

        @property
        def dlock_identity(self) -> Identity: ...
        @property
        def dlock_lock(self) -> LockName | None: ...

    dlock_requeued = False
    #: Rejected without requeueing: the broker may dead-letter it to another exchange.
    dlock_rejected = False
    #: The acknowledgement was lost, so the broker delivers the message again.
    dlock_ack_lost = False
    #: When the acknowledgement was requested from Celery, on the monotonic clock.
    dlock_ack_requested_at = 0.0
    #: The end of the run is stored.
    dlock_end_stored = False
    #: When the pool started it; 0 until then.
    _dlock_accepted_at = 0.0
    #: The acknowledgement waits until the store has the message.
    _dlock_held_back = False

    @functools.cached_property
    def _dlock_deliveries(self) -> DeliveryRegistry:
        return DeliveryRegistry.of(self._app)

    def acknowledge(self) -> None:
        if self._dlock_held_back:
            self._dlock_deliveries.sweeper.acknowledge(self)
            return
        if not self.acknowledged:
            self.dlock_ack_requested_at = time.monotonic()
            self._message.ack = partial(self._dlock_send, "ack")
        super().acknowledge()

    def dlock_acknowledge(self) -> None:
        """Send the acknowledgement if it was held back."""
        # Test and clear the flag in one step. The sweeper's thread and Celery's may both call this, and a broker closes
        # the channel after a second acknowledgement.
        if vars(self).pop("_dlock_held_back", False):
            self.acknowledge()

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  # Celery's signature
        self.dlock_requeued, self.dlock_rejected = requeue, not requeue
        if not self.acknowledged:
            if not requeue:
                self.dlock_ack_requested_at = time.monotonic()
                self._message.reject = partial(self._dlock_send, "reject")
            elif not self._dlock_came_from_here():
                self._message.reject = self._dlock_requeue
        super().reject(requeue=requeue)

    def _dlock_came_from_here(self) -> bool:
        """Return whether the message names a queue that this worker consumes; over Redis its publisher writes that."""
        info = self.message.delivery_info or {}
        return bool(info.get("exchange")) or info.get("routing_key") in self._app.amqp.queues.consume_from

    def _dlock_requeue(self, *args: Any, **kwargs: Any) -> None:
        """Requeue a message that may name a key which is no queue. Runs in place of ``message.reject``.

        If the broker refuses the requeue, the error must not end the worker.
        """
        delattr(self.message, "reject")
        try:
            self.message.reject(*args, **kwargs)
        except self._connection_errors:
            raise
        except Exception:
            logger.exception(
                "Task %s[%s] is lost: the broker cannot requeue it, because its message names a queue of another type; "
                "action required: check its publisher", self.task.name, self.id,
                extra=log_fields(self.task.name, self.id),
            )  # fmt: skip
            self.message.reject(requeue=False)

    def _dlock_send(self, verb: str, *args: Any, **kwargs: Any) -> None:
        """Send the acknowledgement, and record if it was lost. Runs in place of ``message.ack`` or ``.reject``."""
        message, limit = self._message, self._dlock_deliveries.doubtful_after
        delattr(message, verb)
        # If the channel is closed, kombu's virtual transports have requeued the message and raise no error here. If the
        # visibility timeout is over or nearly over, the broker may have delivered the message again. Usually the
        # watchdog has reported this duplicate, so the release has set the done mark. The watchdog could not do so if
        # this whole process was stopped (SIGSTOP).
        late = limit is not None and time.monotonic() - self.dlock_delivered >= limit
        lost = late or channel_is_gone(message)
        try:
            getattr(message, verb)(*args, **kwargs)
        except BaseException:
            lost = True
            raise
        finally:
            if lost:
                self.dlock_ack_lost = True
                if self.dlock_end_stored:
                    # Mark it now, not in a later round: an error of the acknowledgement may end the worker before that.
                    self._dlock_deliveries.completion_marker.mark(self)

    def dlock_completed(self) -> None:
        """Make sure that a message whose end is stored does not run again if its acknowledgement is lost."""
        if (self._message.acknowledged and not self.dlock_ack_lost) or self._needs_no_mark:
            return
        # Set this before the check. In a pool of threads the acknowledgement may fail at the same time. Then at least
        # one of the two threads must see what the other one has set.
        self.dlock_end_stored = True
        deliveries = self._dlock_deliveries
        if self.dlock_ack_lost or channel_is_gone(self.message) or not deliveries.consumes():
            deliveries.completion_marker.mark(self)
        else:
            deliveries.completion_marker.expect_ack(self)

    def dlock_process_died(self) -> None:
        """Like :meth:`dlock_completed`, but for a run whose process died, perhaps before it took the lock.

        It is marked only if it held its lock, which the watchdog reports when it releases that lock.
        """
        if not self._needs_no_mark:
            self._dlock_deliveries.completion_marker.expect_ack_of_dead(self)

    @property
    def dlock_started_at(self) -> float:
        """The start in the pool, or else the receipt, on the monotonic clock."""
        return self._dlock_accepted_at or self.dlock_delivered

    @property
    def _needs_no_mark(self) -> bool:
        if not self.acknowledged or self.dlock_requeued or self.dlock_rejected:
            return True  # the message is to run again, or was rejected for good
        return self.message.acknowledged and not self.dlock_ack_lost
