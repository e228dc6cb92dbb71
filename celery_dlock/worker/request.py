"""The worker's request class: one delivery of one message, as the main process sees it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import states
from celery.app.task import Context
from celery.exceptions import Ignore, InvalidTaskError, Reject, TaskPredicate
from celery.worker import state
from celery.worker.state import task_ready

from ..keys.key_spec import LockName
from ..messaging.delayed_delivery import DEATHS, DELIVERY_EXCHANGE, without_deaths
from ..messaging.message import HEADER, PROPERTY, RepublishHeader
from ..messaging.message_times import seconds_until
from ..messaging.results import stored_failure
from ..messaging.routing import source_queue
from ..messaging.validation import MALFORMED, check_message
from ..options.validation import as_seconds
from ..store.model import Identity
from ..task.base import SingletonTask
from ..task.call_options import OPTIONS_HEADER, Call, call_of
from ..task.outcomes import Postponed, Replaced, Skipped
from ..utils.log import logger
from .ack_tracking import AckTrackingRequest
from .delivery_registry import DeliveryRegistry, sends_task_events

if TYPE_CHECKING:
    from datetime import datetime

    from celery import Celery

__all__ = ["SingletonRequest"]

_NOTHING_CARRIED: Final = RepublishHeader()
#: The content type in whose bodies each nested level has a bracket.
JSON: Final = "application/json"
#: What no user put into a message's headers, as Celery's ``Context`` tells it.
_OF_CELERY: Final = frozenset({*vars(Context), "lang", "task", "argsrepr", "kwargsrepr", "compression"})
#: Seconds that a message may wait before its claim is looked after for the first time: most have started by then.
FIRST_LOOK: Final = 1.0


class SingletonRequest(AckTrackingRequest):
    """One delivery of one message, made in the worker's main process.

    It makes the owner, and hands it to the pool child with the message as it was received.
    """

    # Celery's own, which its stubs leave out.
    _app: Celery
    _eta: datetime | None
    _eventer: Any
    _request_dict: dict[str, Any]
    _body: Any
    _decoded: bool
    _already_cancelled: bool
    _context: Context
    _payload: tuple[Any, Any, Any]
    task: SingletonTask

    #: Its options, if its message was published with a claim.
    dlock_claim_call: Call | None = None
    #: Under the queue policy: its number among the arrivals, and whether its acknowledgement is held back.
    dlock_number = 0
    _dlock_queues = _dlock_held_back = _dlock_copied = False
    #: With ``unique=``: when its claim is to be prolonged, on the monotonic clock; does this process have its message?
    dlock_renew_claim_at = 0.0
    dlock_in_process = True
    #: Celery has cancelled it, and stored RETRY.
    _dlock_stored_retry = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Celery makes a subclass per task and overrides there what it calls at an end.
        if "on_success" in vars(cls):
            cls.on_success = _then_acknowledging(cls.on_success)  # type: ignore[method-assign]  # this is the point
        if "execute_using_pool" in vars(cls):
            cls.execute_using_pool = _numbering(cls.execute_using_pool)  # type: ignore[method-assign]  # likewise

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        """Make the request of a delivery.

        Raises:
            InvalidTaskError: The message is malformed. Celery logs this and rejects the message; any other exception
                would end the worker, and then the next one that receives the message.
        """
        try:
            super().__init__(message, *args, **kwargs)
            self._dlock_check(message)
            self.dlock_delivered = since = time.monotonic()
            if self._eta is not None:
                since += max(0.0, seconds_until(self._eta) or 0.0)
        except MALFORMED as error:
            raise InvalidTaskError(f"malformed message: {type(error).__name__}: {error}") from error
        self.dlock_owner = os.urandom(16).hex()
        self._dlock_deliveries = deliveries = DeliveryRegistry.of(self._app)
        self._dlock_pass_on(message, since)
        deliveries.by_owner[self.dlock_owner] = self
        options, request = self.task.lock_options, self._request_dict
        if OPTIONS_HEADER in request or options.on_conflict == "queue" or options.claims:
            self._dlock_look_at_call(deliveries)

    def _dlock_check(self, message: Any) -> None:
        request = self._request_dict
        # Not `self._payload`, whose property costs eighty steps of the interpreter.
        payload = self._body if self._decoded else message.payload
        text = message.body if message.content_type == JSON else None
        check_message(request, request["properties"], message.delivery_info or {}, payload, text)

    def _dlock_pass_on(self, message: Any, since: float) -> None:
        """Add the delivery to the request, for the pool child."""
        request, deliveries = self._request_dict, self._dlock_deliveries
        carried, header = _NOTHING_CARRIED, request.pop(HEADER, None)
        if header is not None:
            carried = RepublishHeader.of(header, self.dlock_identity)
            self._dlock_copied = carried.conflict_retries > 0 or carried.store_retries > 0
        queue = source_queue(deliveries.queues, message.delivery_info or {}, deliveries.tags)
        properties = request["properties"]
        # The fields of a Delivery and of a Raw, as bare tuples: cheaper to make and to pickle, and this is every task.
        headers = message.headers or {}
        if DEATHS in headers:
            headers = self._dlock_without_deaths(headers, queue)
        raw = (message.body, message.content_type, message.content_encoding, headers, properties, queue)
        delivery = (self.dlock_owner, self.dlock_delivered, since, sends_task_events(self._eventer), raw, *carried)
        # In a copy of the properties: they belong to the message, and top-level keys leak into what the task publishes.
        request["properties"] = {**properties, PROPERTY: delivery}
        if "headers" not in request:
            # What Celery's Context would make of it in the child, by some sixty steps in each task: a twentieth of what
            # a task costs there.
            own = {} if _OF_CELERY.issuperset(request) else {n: request[n] for n in request.keys() - _OF_CELERY}
            request["headers"] = own

    def _dlock_without_deaths(self, headers: Mapping[str, Any], queue: str | None) -> Mapping[str, Any]:
        """Return the headers without RabbitMQ's notes of a delay; the task's own messages would go round by them."""
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
        if self._dlock_copied and queue and info.get("exchange") == DELIVERY_EXCHANGE:
            request["delivery_info"] = {**info, "exchange": "", "routing_key": queue}
        return cleaned

    def _dlock_look_at_call(self, deliveries: DeliveryRegistry) -> None:
        try:
            call = call_of(self.task, self._request_dict)
        except MALFORMED:
            return  # the child says why: it reads the same header
        if not call.enabled:
            return
        self._dlock_queues = call.options.on_conflict == "queue"
        if call.options.claims:
            self.dlock_claim_call = call
            life = as_seconds(call.options.queued_ttl)
            self.dlock_renew_claim_at = self.dlock_delivered + min(FIRST_LOOK, life / 3)
            deliveries.claiming[self.dlock_owner] = self

    @property
    def dlock_identity(self) -> Identity:
        request = self._request_dict
        return Identity(self.id, request.get("retries") or 0, request.get("replaced_task_nesting") or 0)

    def _dlock_number_it(self) -> None:
        """Called when it goes to the pool: at its ETA, not at its receipt."""
        if not self.dlock_number:
            # A copy of ours keeps the place that it had.
            name = None if self._dlock_copied else self.dlock_lock
            self.dlock_number, elder = self._dlock_deliveries.number(self, name)
            properties = self._request_dict["properties"]
            numbered = (*properties[PROPERTY], self.dlock_number, elder)
            self._request_dict["properties"] = {**properties, PROPERTY: numbered}

    @property
    def dlock_lock(self) -> LockName | None:
        """The name of its lock; None where the message cannot be read or its call has no lock: the child says why."""
        try:
            args, kwargs, _ = self._payload
            call = call_of(self.task, self._request_dict)
            return call.name_of(args, kwargs) if call.enabled else None
        except Exception:  # noqa: BLE001  # a serialiser may raise anything
            return None

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        # A message that is acknowledged at its start is lost if the child dies before it is parked or holds its lock.
        self._dlock_held_back = self._dlock_queues and not self.task.acks_late
        super().on_accepted(pid, time_accepted)

    def acknowledge(self) -> None:
        if self._dlock_held_back:
            self._dlock_deliveries.sweeper.acknowledge(self)
        else:
            super().acknowledge()

    def dlock_acknowledge(self) -> None:
        """Acknowledge what was held back."""
        # One step: the sweeper's thread and Celery's own may come at once, and a broker takes a second one ill.
        if vars(self).pop("_dlock_held_back", False):
            super().acknowledge()

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> None:
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        died = isinstance(error, WorkerLostError | Terminated | TimeLimitExceeded | SystemExit | KeyboardInterrupt)
        ended_at = time.monotonic()
        try:
            super().on_failure(exc_info, *args, **kwargs)
        finally:
            self.dlock_acknowledge()
            self.dlock_in_process = False
            if died:
                self._dlock_settle(ended_at)
        # Not if it raised, nor what a cold shutdown passes over: then no end is stored, and what comes back is to run.
        # Nor what was ignored, which may be published anew, or rejected, which may be for another exchange.
        has_end = isinstance(error, Skipped | Replaced) or not isinstance(error, Ignore | Reject)
        if died:
            self._dlock_died()
        elif has_end and (kwargs.get("return_ok") or not _cold_shutdown()):
            if self._dlock_stored_retry and not isinstance(error, TaskPredicate):
                # It was stored between the look for it and the RETRY.
                self._dlock_restore(error, exc_info.traceback)
            self.dlock_completed()
        if isinstance(error, Postponed):
            # Monitors have it as STARTED. Only this event takes that back: Celery's State orders all other states. From
            # here, not from the pool child, whose event could arrive before this process's task-started.
            self.send_event("task-retried", exception=repr(error), traceback=None)

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001  # Celery's signature
        ended_at = time.monotonic()
        super().on_timeout(soft, timeout)
        if not soft:
            self.dlock_acknowledge()
            self._dlock_settle(ended_at)
            self._dlock_died()
            # Last: if Celery's own handler raises, or is slow, billiard has not killed the process yet.
            self._dlock_deliveries.killing(self)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        """Celery stores RETRY. But its body may have ended while the broken connection was closed; then it stays so."""
        # Not at a cold shutdown, which mostly stores nothing: under gevent that calls from where nothing may block.
        retries = kwargs.get("emit_retry", True) and self.store_errors and not self._dlock_deliveries.consumes()
        failure = stored_failure(self.task, self.id) if retries else None
        super()._announce_cancelled(*args, **kwargs)  # type: ignore[misc]  # missing in the stubs
        self._dlock_stored_retry = retries
        if failure is not None:
            self._dlock_restore(*failure)

    def _dlock_restore(self, error: Any, traceback: str | None) -> None:
        """Never raises: Celery's event loop would end with it, or the worker."""
        try:
            self.task.backend.store_result(self.id, error, states.FAILURE, traceback=traceback, request=self._context)
        except Exception as failed:  # noqa: BLE001  # whatever the backend raises
            logger.warning("%s[%s] has failed, and its state stays RETRY: %s", self.task.name, self.id, failed)

    def _announce_revoked(self, *args: Any, **kwargs: Any) -> None:
        ended_at = time.monotonic()
        try:
            super()._announce_revoked(*args, **kwargs)  # type: ignore[misc]  # missing in the stubs
        except MALFORMED:
            # The end cannot be stored: its chain or chord is malformed. The message is not to run in any case.
            logger.exception("Task %s[%s] is revoked, and its end cannot be stored", self.task.name, self.id)
            self.acknowledge()
            self._already_revoked = True
        self._dlock_settle(ended_at)
        self._dlock_died()
        self._dlock_release_claim()
        if self._dlock_queues and (name := self.dlock_lock) is not None:
            self._dlock_deliveries.sweeper.discard_waiter(name, self.dlock_identity.digest)

    def _dlock_settle(self, ended_at: float) -> None:
        """The end of a run whose child is dead or dying is stored: it is final, unless the message comes back."""
        if self.acknowledged and not self.dlock_requeued and not self._already_cancelled:
            if not self.dlock_rejected:
                self._dlock_deliveries.settle(self, ended_at)
            self._dlock_release_claim()

    def _dlock_died(self) -> None:
        if not self._already_cancelled and not _cold_shutdown():  # that may have stored no end
            self.dlock_process_died()

    def _dlock_release_claim(self) -> None:
        """By a thread: a store that is away must not hold the consumer up."""
        if self.dlock_claim_call is not None:
            self._dlock_deliveries.claim_renewer.release_claim(self)


def _cold_shutdown() -> bool:
    status: object = state.should_terminate  # its stubs know only None
    return bool(status)


def _then_acknowledging(on_success: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(on_success)
    def acknowledging(self: SingletonRequest, outcome: Any, *args: Any, **kwargs: Any) -> Any:
        failed, _, runtime = outcome
        killed = not failed and runtime is None and _cold_shutdown()
        if killed and self.task.acks_late and not self.acknowledged:
            # So a green pool calls the end of a body that was killed by a cold shutdown; the message must not end too.
            task_ready(self, successful=False)
            return self.reject(requeue=True)
        try:
            answer = on_success(self, outcome, *args, **kwargs)
        finally:
            if self._dlock_held_back:
                self.dlock_acknowledge()
            # Whatever keeps this object in memory.
            self.dlock_in_process = False
        # Without a runtime its greenlet was killed, and it has no end.
        if not failed and runtime is not None:
            self.dlock_completed()
        return answer

    return acknowledging


def _numbering(execute_using_pool: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute_using_pool)
    def numbering(self: SingletonRequest, *args: Any, **kwargs: Any) -> Any:
        if self._dlock_queues:
            self._dlock_number_it()
        return execute_using_pool(self, *args, **kwargs)

    return numbering
