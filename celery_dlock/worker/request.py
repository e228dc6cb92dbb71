"""The worker's request class: one delivery of one message in the main process."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import states
from celery.app.task import Context
from celery.exceptions import Ignore, InvalidTaskError, Reject, TaskPredicate
from celery.worker import state
from celery.worker.request import Request
from celery.worker.state import task_ready

from ..keys.key_spec import LockName
from ..messaging.message import HEADER, PROPERTY, RepublishHeader
from ..messaging.message_checks import MALFORMED, check_message
from ..messaging.message_times import seconds_until
from ..messaging.rabbitmq_delay import DEATHS, DELIVERY_EXCHANGE, without_deaths
from ..messaging.results import has_end, store_revoked, stored_failure, try_end
from ..messaging.routing import source_queue
from ..options.durations import as_seconds
from ..store.model import Identity
from ..task.base import SingletonTask
from ..task.body_stop import report_stopped
from ..task.call_options import OPTIONS_HEADER, Call, call_of
from ..task.outcomes import Postponed, SelfReplaced, Skipped
from ..utils.log import log_fields, logger
from .completion_marker import channel_is_gone
from .delivery_registry import DeliveryRegistry, sends_task_events

if TYPE_CHECKING:
    from datetime import datetime

    from celery import Celery

    from .body_kill import KilledBody

__all__ = ["SingletonRequest"]

_NO_HEADER: Final = RepublishHeader()
#: The content type of JSON. A JSON text nests no deeper than it has opening brackets. If they are few, the decoded body
#: is not examined.
JSON: Final = "application/json"
#: The headers that Celery itself writes. Its ``Context`` treats every other header as the user's own.
_CELERY_HEADERS: Final = frozenset({*vars(Context), "lang", "task", "argsrepr", "kwargsrepr", "compression"})
#: Seconds until the first renewal of a claim. Most messages have started by then and need none.
FIRST_RENEWAL: Final = 1.0


class SingletonRequest(Request):
    """One delivery of one message, made in the worker's main process.

    It makes the owner's id, and passes the id to the pool child with the message as it was received. It records whether
    its acknowledgement was lost: then the broker delivers the message again.
    """

    # Attributes of Celery's own class that its stubs leave out.
    _already_revoked: bool
    _app: Celery
    _connection_errors: tuple[type[BaseException], ...]
    _eta: datetime | None
    _eventer: Any
    _message: Any
    _request_dict: dict[str, Any]
    _already_cancelled: bool
    _context: Context
    _payload: tuple[Any, Any, Any]
    _Request__payload: Any
    _task: SingletonTask
    task: SingletonTask

    #: The task of this class, and the delivery registry of this worker. Set when the class receives its first message.
    _dlock_kind: tuple[SingletonTask | None, Any] = (None, None)
    #: The task's options make its calls claim a name or park (``queue``, ``replace``). So read each call's own options.
    _dlock_reads_options = False
    #: The call's options, if its message was published with a claim.
    dlock_claim_call: Call | None = None
    #: If the call may be parked: the message's number in the receive order; 0 until it is passed to the pool.
    dlock_number = 0
    #: The call may be parked (``queue``, ``replace``).
    _dlock_queues = False
    #: Milliseconds that the call waits for newer ones (``debounce``); 0 if it does not.
    _dlock_debounce_ms = 0
    #: Calls of this class are numbered before they are passed to the pool.
    _dlock_numbers = False
    #: The library republished this message.
    _dlock_is_copy = False
    #: With ``unique``: when to renew the claim, on the monotonic clock.
    dlock_renew_claim_at = 0.0
    #: This process still has the message, so it renews the claim.
    dlock_in_process = True
    #: Celery has cancelled the run, and stored RETRY.
    _dlock_stored_retry = False
    #: The body was killed, and this object has ended the call.
    _dlock_was_killed = False
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Celery makes a subclass for each task, and overrides ``on_success`` there. Wrap the override.
        if "on_success" in vars(cls):
            cls.on_success = _acknowledging_after(cls.on_success)  # type: ignore[method-assign]  # replaces a method

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        """Make the request of a delivery.

        Raises:
            InvalidTaskError: The message is malformed. Celery logs this and rejects the message. Any other exception
                would end this worker, and then each worker that receives the message.
        """
        try:
            super().__init__(message, *args, **kwargs)
            request, info = self._request_dict, message.delivery_info or {}
            properties = request["properties"]
            text = message.body if message.content_type == JSON else None
            # Celery's decoded body. Its property `_payload` is slower, and every task would pay for it.
            check_message(request, properties, info, self._Request__payload, text)
            self.dlock_delivered = since = time.monotonic()
            if self._eta is not None:
                since += max(0.0, seconds_until(self._eta) or 0.0)
        except MALFORMED as error:
            raise InvalidTaskError(f"malformed message: {type(error).__name__}: {error}") from error
        task, deliveries = self._dlock_kind
        if task is not self._task:
            deliveries = self._dlock_prepare(self._task, self._app)
        self._dlock_deliveries = deliveries
        self.dlock_owner = os.urandom(16).hex()
        deliveries.add(self)
        self._dlock_add_delivery(message, info, properties, since)
        if self._dlock_reads_options or OPTIONS_HEADER in request:
            self._dlock_read_call_options(deliveries)

    @classmethod
    def _dlock_prepare(cls, task: SingletonTask, app: Celery) -> DeliveryRegistry:
        """Look up what is the same for each message of the task, and keep it in Celery's subclass for the task."""
        options, deliveries = task.lock_options, DeliveryRegistry.of(app)
        cls._dlock_reads_options = options.parks or options.claims
        cls._dlock_kind = task, deliveries
        return deliveries

    def _dlock_add_delivery(
        self, message: Any, info: Mapping[str, Any], properties: Mapping[str, Any], since: float
    ) -> None:
        """Add the delivery to the request, for the pool child."""
        request, carried = self._request_dict, _NO_HEADER
        if HEADER in request and (header := request.pop(HEADER)) is not None:
            carried = RepublishHeader.of(header, self.dlock_identity)
            self._dlock_is_copy = carried.conflict_retries > 0 or carried.store_retries > 0
        queue, queues = info.get("routing_key"), self._dlock_deliveries.queues
        if info.get("exchange") or queue not in queues.consume_from:
            queue = source_queue(queues, info, self._dlock_deliveries.tags)
        # Pass the fields of a Delivery and a RawMessage as plain tuples. Every task makes and pickles them, and plain
        # tuples are cheaper.
        headers = message.headers or {}
        if DEATHS in headers:
            headers = self._dlock_without_deaths(headers, queue)
        raw = (message.body, message.content_type, message.content_encoding, headers, properties, queue)
        monitored = self._eventer is not None and sends_task_events(self._eventer)
        delivery = (self.dlock_owner, self.dlock_delivered, since, monitored, raw, *carried)
        # Store the delivery in the properties: a top-level key of the request would leak into the messages that the
        # task publishes. Copy the properties, because they belong to the message.
        request["properties"] = {**properties, PROPERTY: delivery}
        # Add the headers here. Otherwise Celery's Context computes them in the pool child, which costs more.
        if _CELERY_HEADERS.issuperset(request):
            request.setdefault("headers", {})
        elif "headers" not in request:
            request["headers"] = {name: request[name] for name in request.keys() - _CELERY_HEADERS}

    def _dlock_without_deaths(self, headers: Mapping[str, Any], queue: str | None) -> Mapping[str, Any]:
        """Return the headers without the ``x-death`` headers of a delay over RabbitMQ.

        Otherwise the messages that the task publishes would inherit them.
        """
        cleaned = without_deaths(headers)
        if cleaned is headers:
            return headers
        request = self._request_dict
        for name in headers:
            if name not in cleaned:
                request.pop(name, None)
            elif cleaned[name] is not headers[name]:
                request[name] = cleaned[name]
        info = request["delivery_info"]
        if self._dlock_is_copy and queue and info.get("exchange") == DELIVERY_EXCHANGE:
            request["delivery_info"] = {**info, "exchange": "", "routing_key": queue}
        return cleaned

    def _dlock_read_call_options(self, deliveries: DeliveryRegistry) -> None:
        try:
            call = call_of(self.task, self._request_dict)
        except MALFORMED:
            return  # the pool child reads the same header, and reports the error
        if not call.enabled:
            return
        if call.options.parks:
            self._dlock_queues = True
            if not self.dlock_identity.retries:
                self._dlock_debounce_ms = call.options.debounce_ms[0]
            self._dlock_number_messages()
        if call.options.claims:
            self.dlock_claim_call = call
            life = as_seconds(call.options.queued_ttl)
            self.dlock_renew_claim_at = self.dlock_delivered + min(FIRST_RENEWAL, life / 3)
            deliveries.claiming[self.dlock_owner] = self

    @property
    def dlock_identity(self) -> Identity:
        return Identity.of(self.id, self._request_dict)

    @classmethod
    def _dlock_number_messages(cls) -> None:
        """Wrap Celery's method, for the first message of the class that may be parked."""
        if "_dlock_numbers" not in vars(cls):
            cls._dlock_numbers = True
            cls.execute_using_pool = _numbering_before(cls.execute_using_pool)  # type: ignore[method-assign]  # replaces a method

    def _dlock_assign_number(self) -> None:
        """Assign the number in the receive order. Call this when the message is passed to the pool, after its ETA."""
        if not self.dlock_number:
            # A republished message keeps its rank, so it needs no predecessor.
            name = None if self._dlock_is_copy else self.dlock_lock
            self.dlock_number, predecessor = self._dlock_deliveries.number(self, name)
            properties = self._request_dict["properties"]
            numbered = (*properties[PROPERTY], self.dlock_number, predecessor)
            self._request_dict["properties"] = {**properties, PROPERTY: numbered}
            if self._dlock_debounce_ms and name is not None:
                self._dlock_deliveries.sweeper.sweep_after(self.dlock_number, name, self._dlock_debounce_ms / 1000)

    @property
    def dlock_lock(self) -> LockName | None:
        """The lock name; None if the message cannot be read or the call takes no lock. The child reports why."""
        try:
            args, kwargs, _ = self._payload
            call = call_of(self.task, self._request_dict)
            return call.name_of(args, kwargs) if call.enabled else None
        except Exception:  # noqa: BLE001  # a serialiser may raise any error
            return None

    # -- acknowledgement
    #
    # Celery sends the acknowledgement in a later round of its event loop. If that fails, Celery only logs the error.
    # Its callback there is ``message.ack_log_error``, which calls ``message.ack``. This class replaces ``message.ack``
    # and not the callback: at the shutdown of a prefork pool, Celery runs only callbacks of that name.

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

    # -- start and end of the run

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        self._dlock_accepted_at = time_accepted
        if self._dlock_queues and not self.task.acks_late:
            # A message acknowledged at its start is lost if the child dies before it is parked or holds its lock.
            self._dlock_held_back = True
        super().on_accepted(pid, time_accepted)

    @property
    def _dlock_log_fields(self) -> dict[str, str | None]:
        name = self.dlock_lock
        return log_fields(self.task.name, self.id, name.text if name is not None else "")

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        died = isinstance(error, WorkerLostError | Terminated | TimeLimitExceeded | SystemExit | KeyboardInterrupt)
        ended_at = time.monotonic()
        try:
            self._dlock_fail(exc_info, *args, **kwargs)
        finally:
            self.dlock_acknowledge()
            self.dlock_in_process = False
            if died:
                self._dlock_settle(ended_at)
        # Set no done mark in a cold shutdown: no end is stored, so a redelivered message must run. If Celery's method
        # above raised, no end is stored either, and these lines are not reached. Set no mark after Ignore or Reject:
        # the task may have published its message again, or rejected it to a dead letter exchange.
        is_end = isinstance(error, Skipped | SelfReplaced) or not isinstance(error, Ignore | Reject)
        if died:
            self._dlock_died()
        elif is_end and (kwargs.get("return_ok") or not _cold_shutdown()):
            if self._dlock_stored_retry and not isinstance(error, TaskPredicate):
                # The failure was stored after `_announce_cancelled` read the state, and RETRY has overwritten it.
                self._dlock_restore(error, exc_info.traceback)
            self.dlock_completed()
        if isinstance(error, Postponed):
            # Monitors show the task as STARTED. Only task-retried makes Celery's State show it as waiting again. Send
            # it here, because an event of the pool child could arrive before task-started.
            self.send_event("task-retried", exception=repr(error), traceback=None)

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001  # Celery's signature
        ended_at = time.monotonic()
        # The hard time limit may strike between the kill and the moment when Celery notices the child's death.
        if not self._dlock_was_killed:
            super().on_timeout(soft, timeout)
        if not soft:
            self.dlock_acknowledge()
            self._dlock_settle(ended_at)
            self._dlock_died()
            # Call this last, because it starts the grace period for the kill. billiard kills the process after this
            # method has returned.
            self._dlock_deliveries.killing(self)

    def _dlock_fail(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        """End the run as Celery does; if the worker has killed the body, end the call REVOKED and not as a crash."""
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

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        """Store RETRY as Celery does. If the body failed while a lost connection was being closed, restore FAILURE."""
        # Celery cancels requests in two cases: after a lost connection (the worker then no longer consumes), and in a
        # cold shutdown (it still consumes). In a cold shutdown, do not read the state: usually no FAILURE is stored.
        # Under gevent, Celery then calls this method from a place that must not block.
        retries = kwargs.get("emit_retry", True) and self.store_errors and not self._dlock_deliveries.consumes()
        failure = stored_failure(self.task, self.id) if retries else None
        super()._announce_cancelled(*args, **kwargs)  # type: ignore[misc]  # missing in the stubs
        self._dlock_stored_retry = retries
        if failure is not None:
            self._dlock_restore(*failure)

    def _dlock_restore(self, error: Any, traceback: str | None) -> None:
        """Store FAILURE again. This never raises, because an error would end Celery's event loop or the worker."""
        try:
            self.task.backend.store_result(self.id, error, states.FAILURE, traceback=traceback, request=self._context)
        except Exception as failed:  # noqa: BLE001  # each result backend raises errors of its own
            fields = self._dlock_log_fields
            logger.warning(
                "Task %s[%s] (lock %r) has failed, but its state stays RETRY, because FAILURE cannot be stored: %s",
                *fields.values(), failed, extra=fields,
            )  # fmt: skip

    def _announce_revoked(self, *args: Any, **kwargs: Any) -> None:
        ended_at = time.monotonic()
        try:
            super()._announce_revoked(*args, **kwargs)  # type: ignore[misc]  # missing in the stubs
        except MALFORMED:
            # The task's chain or chord is malformed, so its end cannot be stored. Even so, the message must not run.
            fields = self._dlock_log_fields
            logger.exception(
                "Task %s[%s] (lock %r) is revoked and does not run, but its end cannot be stored: malformed message",
                *fields.values(), extra=fields,
            )  # fmt: skip
            self.acknowledge()
            self._already_revoked = True
        self._dlock_settle(ended_at)
        self._dlock_died()
        self._dlock_release_claim()
        if self._dlock_queues and (name := self.dlock_lock) is not None:
            self._dlock_deliveries.sweeper.discard_waiter(name, self.dlock_identity.digest)

    def _dlock_settle(self, ended_at: float) -> None:
        """Release the claim of a message that the main process ended, and have its done mark set.

        Do nothing if the message is not acknowledged or was requeued, or if Celery cancelled its run. A rejected
        message gets no done mark.
        """
        if self.acknowledged and not self.dlock_requeued and not self._already_cancelled:
            if not self.dlock_rejected:
                self._dlock_deliveries.settle(self, ended_at)
            self._dlock_release_claim()

    def _dlock_died(self) -> None:
        if not self._already_cancelled and not _cold_shutdown():  # a cold shutdown may have stored no end
            self.dlock_process_died()

    def _dlock_release_claim(self) -> None:
        """Have the claim renewer's thread release the claim: an unreachable store must not block the consumer."""
        if self.dlock_claim_call is not None:
            self._dlock_deliveries.claim_renewer.release_claim(self)


def _cold_shutdown() -> bool:
    status: object = state.should_terminate  # the stubs declare it as None
    return bool(status)


def _acknowledging_after(on_success: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(on_success)
    def acknowledging(self: SingletonRequest, outcome: Any, **kwargs: Any) -> Any:
        failed, _, runtime = outcome
        # If the outcome has no duration (`runtime` is None), the greenlet was killed and no end is stored.
        killed = runtime is None and not failed
        if killed and _cold_shutdown() and self.task.acks_late and not self.acknowledged:
            # A cold shutdown killed the body, and a pool of greenlets reports that as success. Requeue the message.
            task_ready(self, successful=False)
            return self.reject(requeue=True)
        try:
            answer = on_success(self, outcome, **kwargs)
        finally:
            if self._dlock_held_back:
                self.dlock_acknowledge()
            # The claim must not be renewed any more. This object may be deleted much later, so do not wait for that.
            self.dlock_in_process = False
        if not (failed or killed):
            self.dlock_completed()
        return answer

    return acknowledging


def _numbering_before(execute_using_pool: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute_using_pool)
    def numbering(self: SingletonRequest, pool: Any, **kwargs: Any) -> Any:
        if self._dlock_queues:
            self._dlock_assign_number()
        return execute_using_pool(self, pool, **kwargs)

    return numbering
