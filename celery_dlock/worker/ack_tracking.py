"""Whether the broker heard how a delivery ended: what it did not hear of, it delivers again."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from celery.worker.request import Request

from ..utils.log import logger
from .completion_marker import channel_is_gone
from .delivery_registry import DeliveryRegistry

if TYPE_CHECKING:
    from celery import Celery

    from ..keys.key_spec import LockName
    from ..store.model import Identity

__all__ = ["AckTrackingRequest"]


class AckTrackingRequest(Request):
    """A delivery that is there when the broker is told.

    Celery leaves that to a later round of its event loop, logs a failure, and tells nobody. Its own callback stays in
    place: when it shuts down, Celery looks for those of messages and for no others.
    """

    # Celery's own, which its stubs leave out.
    _app: Celery
    _connection_errors: tuple[type[BaseException], ...]

    if TYPE_CHECKING:  # what the request adds that is made of this
        dlock_owner: str
        dlock_delivered: float

        @property
        def dlock_identity(self) -> Identity: ...
        @property
        def dlock_lock(self) -> LockName | None: ...

    dlock_requeued = False
    #: Given up without an acknowledgement: it may be for another exchange.
    dlock_rejected = False
    #: The broker did not hear of its acknowledgement, so it delivers the message again.
    dlock_ack_lost = False
    #: When Celery was asked to acknowledge it, on the monotonic clock.
    dlock_ack_requested_at = 0.0
    #: Its end is stored.
    dlock_end_stored = False
    #: 0 until its pool has begun with it.
    _dlock_accepted_at = 0.0

    @functools.cached_property
    def _dlock_deliveries(self) -> DeliveryRegistry:
        return DeliveryRegistry.of(self._app)

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        self._dlock_accepted_at = time_accepted
        super().on_accepted(pid, time_accepted)

    def acknowledge(self) -> None:
        self._dlock_track("ack")
        super().acknowledge()

    def reject(self, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  # Celery's signature
        self.dlock_requeued, self.dlock_rejected = requeue, not requeue
        if not requeue:
            self._dlock_track("reject")
        elif not self.acknowledged and not self._dlock_came_from_here():
            self.message.reject = self._dlock_requeue
        super().reject(requeue=requeue)

    def _dlock_came_from_here(self) -> bool:
        """Return whether the message names a queue that this worker consumes; over Redis its publisher writes that."""
        info = self.message.delivery_info or {}
        return bool(info.get("exchange")) or info.get("routing_key") in self._app.amqp.queues.consume_from

    def _dlock_requeue(self, *args: Any, **kwargs: Any) -> None:
        """In the place of the message's own method: requeue a message that may name no queue at all.

        If the broker refuses that, the error would end the worker.
        """
        delattr(self.message, "reject")
        try:
            self.message.reject(*args, **kwargs)
        except self._connection_errors:
            raise
        except Exception:
            logger.exception(
                "Task %s[%s] is lost: the broker cannot requeue it, because its message names a queue of another type. "
                "Check who publishes it", self.task.name, self.id,
            )  # fmt: skip
            self.message.reject(requeue=False)

    def _dlock_track(self, verb: str) -> None:
        if not self.acknowledged:
            self.dlock_ack_requested_at = time.monotonic()
            setattr(self.message, verb, functools.partial(self._dlock_send, verb))

    def _dlock_send(self, verb: str, *args: Any, **kwargs: Any) -> None:
        """In the place of the message's own method."""
        delattr(self.message, verb)
        # Over a closed channel kombu's virtual transports acknowledge without a word what they gave back at its end.
        heard = not channel_is_gone(self.message) and not self._dlock_is_late()
        try:
            getattr(self.message, verb)(*args, **kwargs)
        except BaseException:
            heard = False
            raise
        finally:
            if not heard:
                self.dlock_ack_lost = True
                if self.dlock_end_stored:
                    # Now: the event loop may end with this, and the worker before it runs again.
                    self._dlock_deliveries.completion_marker.mark(self)

    def _dlock_is_late(self) -> bool:
        """Is the broker told only now that it may have delivered the message again?

        Mostly the release marks the end of such a run, because the keeper left word. But it cannot where this whole
        process stood still.
        """
        patience = self._dlock_deliveries.runtime.settings.doubtful_after
        return patience is not None and time.monotonic() - self.dlock_delivered >= patience

    def dlock_completed(self) -> None:
        """Its end is stored: see to it that it does not run again, should the broker not hear of it."""
        if self._needs_no_mark:
            return
        # Before the look: with a pool of threads the acknowledgement may fail beside it, and one of the two has to see
        # the other.
        self.dlock_end_stored = True
        deliveries = self._dlock_deliveries
        if self.dlock_ack_lost or channel_is_gone(self.message) or not deliveries.consumes():
            deliveries.completion_marker.mark(self)
        else:
            deliveries.completion_marker.expect_ack(self)

    def dlock_process_died(self) -> None:
        """As :meth:`dlock_completed`, but nobody knows how far it came: it may be parked, or published again.

        That it held its lock the keeper tells, which frees that.
        """
        if not self._needs_no_mark:
            self._dlock_deliveries.completion_marker.expect_ack_of_dead(self)

    @property
    def dlock_started_at(self) -> float:
        """When its pool began with it, on the monotonic clock."""
        return self._dlock_accepted_at or self.dlock_delivered

    @property
    def _needs_no_mark(self) -> bool:
        if not self.acknowledged or self.dlock_requeued or self.dlock_rejected:
            return True  # it is to come back, or the task's to say what becomes of it
        return self.message.acknowledged and not self.dlock_ack_lost
