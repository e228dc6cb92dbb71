"""The hand-off: publishes the message of a granted waiter, or ends a waiter that can no longer run.

A message that cannot be read or published becomes a dead letter here. ``sweep.lua`` makes a dead letter
of a message that no worker started in time, and of one that no worker of its own broker published.
"""

from __future__ import annotations

import collections
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded
from celery.exceptions import TaskRevokedError

from ..counters.meter import Counts
from ..errors import StoreUnavailable, Unpublishable
from ..keys.lock_name import LockName, task_of_name
from ..store.model import Grant, Identity
from ..utils.fork_guard import no_fork
from ..utils.log import log_fields, logger
from .broker_identity import broker_of
from .message import RepublishHeader, next_count, publish_parked
from .parked import ParkedMessage
from .results import END_WITHIN, has_end, store_revoked, try_end
from .wire import NewerWireVersion

if TYPE_CHECKING:
    from celery import Celery

    from ..store.base import LockStore

__all__ = ["GrantPublisher", "end"]


#: Maximum number of entries in ``_left_at``. A full ``_left_at`` is emptied, so warnings may be logged again.
MAX_WARNED: Final = 10_000
#: Seconds for which a process does not sweep a lock after it left that lock's message to other workers (of another
#: broker, or newer ones). Those workers find the message within that time. The lock's next message may be for this
#: process, and then waits for up to LEAVE_FOR. So keep it below the 2 s in docs/explanation/how-the-queue-works.md.
LEAVE_FOR: Final = 1.5
#: Seconds for which the queue sweeper tries to store an end that the result backend does not take, and between two
#: tries. Each try may block the sweeper until the backend's own timeout.
END_LATER_WITHIN: Final = 60.0
END_LATER_DELAY: Final = 5.0


class _Unended(NamedTuple):
    """A waiter that was taken out of its queue, and whose end is not stored yet."""

    name: LockName
    waiter: Grant
    error: TaskRevokedError
    until: float


class GrantPublisher:
    """Publishes the messages of granted waiters.

    If a hand-off fails, the grant stays in the store. The queue sweeper finds it there and publishes its message.

    Args:
        app: The app whose broker to use.
        store: The store of the queues.
        grant_timeout: Seconds that a published message has to start before its grant is lost.
        producer: Opens a connection to the broker.
        broker: The broker's identity; None: its URL without user and password.
        monitored_as: Returns the worker's node name while it sends monitor events; else None.
        counts: Counts dead letters and waiting times.
        ends_later: If the result backend does not take an end, do not wait: :meth:`store_unended` is called repeatedly.
    """

    def __init__(
        self,
        app: Celery,
        store: LockStore,
        grant_timeout: float,
        producer: Callable[[], AbstractContextManager[Any]],
        broker: str | None = None,
        monitored_as: Callable[[], str | None] = lambda: None,
        counts: Counts | None = None,
        *,
        ends_later: bool = False,
    ) -> None:
        self._app = app
        self._counts = counts or Counts()
        self._store = store
        self._grant_timeout_ms = round(grant_timeout * 1000)
        self._producer = producer
        self._monitored_as = monitored_as
        # Not a cached_property: before Python 3.12 it has a lock, which a forked child could inherit locked.
        self._broker = broker
        #: By lock name, the time when a message was last left to other workers.
        self._left_at: dict[LockName, float] = {}
        self._ends_later = ends_later
        self._unended: collections.deque[_Unended] = collections.deque()
        self._next_try = 0.0

    @property
    def broker(self) -> str:
        """The identity of the broker that the app publishes to (``dlock_broker``)."""
        if self._broker is None:
            self._broker = broker_of(self._app)
        return self._broker

    def publish_next(self, name: LockName, grant: Grant | None) -> bool:
        """Publish the granted message. A message that can no longer run ends here, and the next waiter is granted.

        Return False if the broker did not take the message. No error of the store or the broker is raised; a soft time
        limit may be raised here as anywhere.
        """
        expired: list[Grant] = []
        published = self._publish_first(name, grant, expired)
        for waiter in expired:  # now that the next waiter does not have to wait for the result backend
            self.evict(name, waiter, TaskRevokedError(f"{name}: expired while it waited"))
        return published

    def _publish_first(self, name: LockName, grant: Grant | None, expired: list[Grant]) -> bool:
        """Publish the first of the granted messages that has not expired. Take the others out of the queue."""
        try:
            with no_fork():
                while grant is not None:
                    grant = self._publish(name, grant, expired)
        except StoreUnavailable as error:
            logger.warning(
                "%s: hand-off failed, the queue sweeper will retry it: %s",
                name,
                error,
                extra=log_fields(lock_name=name.text),
            )
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001  # kombu's transports raise errors of their own libraries
            logger.warning(
                "%s: hand-off failed at the broker, the queue sweeper will retry it: %r", name, error,
                extra=log_fields(lock_name=name.text),
            )  # fmt: skip
            if grant is not None:
                self._keep(name, grant)
            return False
        return True

    def remove_waiter(self, name: LockName, identity: str, reason: str = "") -> None:
        """Take a waiter out of the queue. Its message will not run.

        Args:
            name: The lock name.
            identity: The digest of the waiter's identity.
            reason: Store REVOKED with this reason; "": the caller has stored the result.

        Raises:
            StoreUnavailable: The waiter may still be queued.
        """
        with no_fork():
            taken = self._store.remove_waiter(name, identity, uuid.uuid4().hex, ended=not reason)
        self.publish_next(name, taken.granted)
        if taken.entry and reason:
            self.evict(name, Grant(identity, taken.entry), TaskRevokedError(f"{name}: {reason}"))

    def store_unended(self) -> None:
        """Store the ends that the result backend did not take before, if it takes them now."""
        while self._unended and time.monotonic() >= self._next_try:
            name, waiter, error, until = self._unended[0]
            if self._evict(name, waiter, error, gives_up=time.monotonic() >= until) is None:
                self._next_try = time.monotonic() + END_LATER_DELAY
            else:
                self._unended.popleft()

    def give_up_unended(self) -> None:
        """Log the ends that are not stored yet, because this process ends."""
        while self._unended:
            name, waiter, error, _ = self._unended.popleft()
            logger.error(
                "Task %s has ended (%s), but its end is not stored; action required: drop it from the dead letters, %s",
                ParkedMessage.call_in(waiter.entry), error, self._store.dead_letters_at(name),
                extra=log_fields(lock_name=name.text),
            )  # fmt: skip

    def evict(self, name: LockName, waiter: Grant, error: TaskRevokedError, *, keeps_end: bool = False) -> bool:
        """Store the end of a waiter, then delete its message from the store. Return whether that was done.

        Until the end is stored, the store keeps the message in one of two forms:

        - A message that a newer call replaced is still in its queue. If this process dies, a sweep grants that message
          the lock, and the worker that receives the message ends it.
        - Any other message is among the dead letters. If this process dies, the message stays there.

        Args:
            name: The lock name.
            waiter: The waiter.
            error: The end to store.
            keeps_end: The call may have run before. If its end is stored already, do not overwrite it.
        """
        if not self._ends_later:
            return bool(self._evict(name, waiter, error, keeps_end=keeps_end, within=END_WITHIN))
        # While the result backend takes no end, only `store_unended` tries.
        stored = None if self._unended else self._evict(name, waiter, error, keeps_end=keeps_end, gives_up=False)
        if stored is None:
            self._unended.append(_Unended(name, waiter, error, time.monotonic() + END_LATER_WITHIN))
        return bool(stored)

    def _evict(
        self,
        name: LockName,
        waiter: Grant,
        error: TaskRevokedError,
        *,
        keeps_end: bool = False,
        within: float = 0.0,
        gives_up: bool = True,
    ) -> bool | None:
        """Do what :meth:`evict` says. Return None if a later try may store the end, and ``gives_up`` is false."""
        try:
            with no_fork():
                stored = end(self._app, waiter.entry, error, keeps_end=keeps_end, within=within, gives_up=gives_up)
                if not stored:
                    return stored
                granted = self._store.remove_waiter(name, waiter.identity, uuid.uuid4().hex, ended=True).granted
                self._release_claim(name, waiter.entry)
                self._send_revoked(ParkedMessage.read(waiter.entry).task_id)
                # The replaced call may have had the grant, which has now passed to the next waiter.
                self.publish_next(name, granted)
        except StoreUnavailable as away:
            logger.warning(
                "%s: a message that has ended could not be deleted; "
                "action required: if it is among the dead letters, delete it there: %s",
                name,
                away,
                extra=log_fields(lock_name=name.text),
            )
            return False
        return True

    def _send_revoked(self, task_id: str) -> None:
        """Send ``task-revoked`` for a waiter that never started.

        Its worker sent ``task-retried`` when it parked the message. Monitors would show that state (RETRY) for ever.
        """
        node = self._monitored_as()
        if node is None:
            return
        try:
            with (
                self._producer() as producer,
                self._app.events.Dispatcher(producer.connection, node, channel=producer.channel) as dispatcher,
            ):
                dispatcher.send("task-revoked", uuid=task_id, terminated=False, signum=None, expired=False)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001  # kombu's transports raise errors of their own libraries
            logger.debug("cannot send the event task-revoked of %s: %r", task_id, error)

    def _release_claim(self, name: LockName, entry: str) -> None:
        headers = ParkedMessage.read(entry).raw.headers
        identity = Identity.of(headers["id"], headers)
        self._store.release_claim(name, identity.task_id, identity.generation)

    def _leave_to_its_broker(self, name: LockName, grant: Grant, broker: str) -> None:
        self._leave(
            name, grant,
            f"was parked under the broker {broker}, and this process publishes to {self.broker}; the message waits for "
            "a worker of its broker and becomes a dead letter if there is none. If both URLs lead to the same broker, "
            f"set dlock_broker={broker!r}",
            present=self._store.has_workers(broker),
        )  # fmt: skip

    def _leave(self, name: LockName, grant: Grant, reason: str, *, present: bool = False) -> None:
        """Leave the message to workers that can publish it. If none does, it becomes a dead letter.

        Args:
            name: The lock name.
            grant: The grant.
            reason: Why this process cannot publish it, and what to do, for the log.
            present: Such workers are running, so the message does not become a dead letter.
        """
        if name not in self._left_at:
            if len(self._left_at) >= MAX_WARNED:
                self._left_at.clear()
            logger.warning("%s: the next message %s", name, reason, extra=log_fields(lock_name=name.text))
        self._left_at[name] = time.monotonic()
        self._store.decline_grant(name, grant, foreign=True, present=present)

    def left_to_others(self, name: LockName) -> bool:
        """Return whether this process has just left this lock's next message to other workers.

        If this process swept the lock again at once, those workers might never be the first to find the message.
        """
        return time.monotonic() - self._left_at.get(name, -LEAVE_FOR) < LEAVE_FOR

    def _keep(self, name: LockName, grant: Grant) -> None:
        """Record that a worker of the message's own broker tried to publish it, so it becomes no dead letter yet."""
        try:
            self._store.decline_grant(name, grant, foreign=False)
        except StoreUnavailable as error:
            logger.debug("%s: cannot record the failed hand-off: %s", name, error)

    def _publish(self, name: LockName, grant: Grant, expired: list[Grant]) -> Grant | None:
        """Publish one granted message. If it cannot run, return the next grant; add an expired one to ``expired``."""
        try:
            parked = ParkedMessage.read(grant.entry)
        except NewerWireVersion as newer:
            self._leave(name, grant, f"is left to a worker of a newer version: {newer}")
            return None
        except ValueError:
            where = self._store.dead_letters_at(name)
            # Log no traceback: it does not help to identify the message.
            logger.error(  # noqa: TRY400
                "%s: a parked message cannot be read; action required: see the dead letters, %s", name, where,
                extra=log_fields(lock_name=name.text),
            )  # fmt: skip
            return self._make_dead_letter(name, grant, task_of_name(name))
        if parked.broker != self.broker:
            self._leave_to_its_broker(name, grant, parked.broker)
            return None
        # End an expired message. If its task is not registered here, this process cannot store the end. It publishes
        # such a message like any other, and the worker that receives the message ends it.
        if parked.expired and parked.task in self._app.tasks:
            taken = self._store.remove_waiter(name, grant.identity, uuid.uuid4().hex)
            if taken.entry:
                expired.append(Grant(grant.identity, taken.entry))
            return taken.granted
        header = RepublishHeader(
            parked.rank_us, next_count(parked.conflict_retries), grant.grant_id, redelivered=parked.redelivered
        )
        try:
            publish_parked(self._app, self._producer, parked.raw, grant.identity, header)
        except Unpublishable:
            # No later attempt could publish the message, and the queue would be blocked for ever.
            where = self._store.dead_letters_at(name)
            logger.exception(
                "%s: the message of task %s[%s] cannot be published; action required: see the dead letters, %s",
                name, parked.task, parked.task_id, where,
                extra=log_fields(parked.task, parked.task_id, name.text),
            )  # fmt: skip
            return self._make_dead_letter(name, grant, parked.task)
        self._store.confirm_publish(name, grant.identity, self._grant_timeout_ms)
        self._counts.observe("wait_seconds", max(0.0, time.time() - parked.rank_us / 1e6), parked.task)
        return None

    def _make_dead_letter(self, name: LockName, grant: Grant, task: str) -> Grant | None:
        """Set the message aside; return the next grant."""
        removed = self._store.remove_waiter(name, grant.identity, uuid.uuid4().hex, dead_letter=True)
        self._counts.count("dead_letters", task)
        return removed.granted


def end(
    app: Celery,
    entry: str,
    reason: TaskRevokedError,
    *,
    keeps_end: bool = False,
    within: float = 0.0,
    gives_up: bool = True,
) -> bool | None:
    """Store REVOKED for a parked message that will not run, and for everything that follows it in its canvas.

    With ``keeps_end``, an end that is stored already does not change. The other arguments and the value are those of
    :func:`~celery_dlock.messaging.results.try_end`.
    """
    try:
        parked = ParkedMessage.read(entry)
    except NewerWireVersion as newer:
        logger.error(  # noqa: TRY400  # the traceback says nothing more
            "cannot store the end of %s: %s; action required: publish or drop it from the dead letters with a newer "
            "celery-dlock; %s",
            ParkedMessage.call_in(entry), newer, reason,
        )  # fmt: skip
        return False
    except ValueError:
        logger.exception("cannot store the end of a parked message: %s", reason)
        return False
    task = app.tasks.get(parked.task)
    facts = log_fields(parked.task, parked.task_id)
    if task is None:
        logger.error(
            "%s; the end of task %s[%s] cannot be stored, because this task is not registered here",
            reason, parked.task, parked.task_id, extra=facts,
        )  # fmt: skip
        return False
    kept = False

    def store() -> None:
        nonlocal kept
        kept = keeps_end and has_end(task, parked.task_id)
        if not kept:
            store_revoked(task, parked.request(app), reason)

    stored = try_end(task, parked.task_id, store, within, gives_up=gives_up)
    if stored and not kept:
        logger.info("Task %s[%s] is revoked: %s", parked.task, parked.task_id, reason, extra=facts)
    return stored
