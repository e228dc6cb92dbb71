"""The hand-off: publishes the message of a granted waiter, or ends a waiter that can no longer run.

A message that cannot be read or published becomes a dead letter here. A message that no worker took in time, or that
only workers of other brokers saw, becomes one in ``sweep.lua``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from billiard.exceptions import SoftTimeLimitExceeded
from celery.app.task import Context
from celery.exceptions import TaskRevokedError

from ..errors import StoreUnavailable, Unpublishable
from ..keys.lock_name import LockName
from ..store.model import Grant, Identity
from ..utils.fork_guard import no_fork
from ..utils.log import log_fields, logger
from .broker_identity import broker_of
from .message import RepublishHeader, next_count, publish_parked
from .parked import ParkedMessage
from .results import store_revoked

if TYPE_CHECKING:
    from celery import Celery

    from ..store.base import QueueStore

__all__ = ["GrantPublisher", "end"]


#: Lock names for which one process remembers that it warned of a message of another broker.
MAX_WARNED: Final = 10_000
#: Seconds for which a process leaves a lock to the workers of another broker after it met a message of that broker.
#: These workers need less. It is less than 2 s, because the next message may be this process's own.
LEAVE_FOR: Final = 1.5


class GrantPublisher:
    """Publishes the messages of granted waiters.

    If a hand-off fails, the grant becomes due, and a sweep hands it out again.

    Args:
        app: The app whose broker to use.
        store: The store of the queues.
        grant_timeout: Seconds from the publication until the grant is due.
        producer: Opens a connection to the broker.
        broker: The broker's identity; None: its URL without user and password.
        monitored_as: Returns the worker's node name while it sends monitor events; else None.
    """

    def __init__(
        self,
        app: Celery,
        store: QueueStore,
        grant_timeout: float,
        producer: Callable[[], AbstractContextManager[Any]],
        broker: str | None = None,
        monitored_as: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._app = app
        self._store = store
        self._grant_timeout_ms = round(grant_timeout * 1000)
        self._producer = producer
        self._monitored_as = monitored_as
        # Not a cached property: before Python 3.12 that has one lock for all processes of a fork.
        self._broker = broker
        #: Lock names for which it warned of a message of another broker, and when it last left one to that broker.
        self._left_at: dict[LockName, float] = {}

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
        try:
            with no_fork():
                while grant is not None:
                    grant = self._publish(name, grant)
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
            reason: The reason for which it ends REVOKED here; "": its end is stored already.

        Raises:
            StoreUnavailable: The waiter may still be queued.
        """
        with no_fork():
            self.publish_next(name, self._taken_out(name, identity, reason))

    def evict(self, name: LockName, waiter: Grant, error: TaskRevokedError) -> None:
        """End a waiter that was taken out. If its end cannot be stored, it stays among the dead letters."""
        try:
            with no_fork():
                if end(self._app, waiter.entry, error):
                    self._taken_out(name, waiter.identity)
                    self._release_claim(name, waiter.entry)
                    self._send_revoked(ParkedMessage.read(waiter.entry).task_id)
        except StoreUnavailable as away:
            logger.warning(
                "%s: a message that has ended is still among the dead letters: %s",
                name,
                away,
                extra=log_fields(lock_name=name.text),
            )

    def _send_revoked(self, task_id: str) -> None:
        """Send the end of a waiter that never started. Monitors show it as RETRY since it was parked."""
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
        identity = Identity(headers["id"], headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0)
        self._store.release_claim(name, identity.task_id, identity.generation)

    def _taken_out(self, name: LockName, identity: str, reason: str = "") -> Grant | None:
        taken = self._store.remove_waiter(name, identity, uuid.uuid4().hex, ended=not reason)
        if taken.entry and reason:
            self.evict(name, Grant(identity, taken.entry), TaskRevokedError(f"{name}: {reason}"))
        return taken.granted

    def _leave_to_its_broker(self, name: LockName, grant: Grant, broker: str) -> None:
        if name not in self._left_at:
            if len(self._left_at) >= MAX_WARNED:
                self._left_at.clear()
            logger.warning(
                "%s: the next message was parked under the broker %s, and this process publishes to %s; it waits for a "
                "worker of that broker and becomes a dead letter if none comes. "
                "If both are one broker, set dlock_broker=%r",
                name, broker, self.broker, broker, extra=log_fields(lock_name=name.text),
            )  # fmt: skip
        self._left_at[name] = time.monotonic()
        present = self._store.has_workers(broker)
        self._store.decline_grant(name, grant, foreign=True, present=present)

    def left_to_others(self, name: LockName) -> bool:
        """Return whether this process has just left this lock's next message to the workers of another broker.

        If this process looked again, it could be first each time, and these workers would never get the message.
        """
        return time.monotonic() - self._left_at.get(name, -LEAVE_FOR) < LEAVE_FOR

    def _keep(self, name: LockName, grant: Grant) -> None:
        """Store that a worker of the message's own broker saw it. It does not become a dead letter then."""
        try:
            self._store.decline_grant(name, grant, foreign=False)
        except StoreUnavailable as error:
            logger.debug("%s: %s", name, error)

    def _publish(self, name: LockName, grant: Grant) -> Grant | None:
        """Publish one granted message; return the next grant if this message ended instead."""
        try:
            parked = ParkedMessage.read(grant.entry)
        except ValueError:
            where = self._store.dead_letters_at(name)
            # Without the traceback, which does not tell whose message it is.
            logger.error(  # noqa: TRY400
                "%s: a parked message cannot be read; action required: see the dead letters, %s", name, where,
                extra=log_fields(lock_name=name.text),
            )  # fmt: skip
            return self._store.remove_waiter(name, grant.identity, uuid.uuid4().hex, dead_letter=True).granted
        if parked.broker != self.broker:
            self._leave_to_its_broker(name, grant, parked.broker)
            return None
        # If the task is not registered here, publish its message all the same: the worker that receives it ends it.
        if parked.expired and parked.task in self._app.tasks:
            return self._taken_out(name, grant.identity, "expired while it waited")
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
            return self._store.remove_waiter(name, grant.identity, uuid.uuid4().hex, dead_letter=True).granted
        self._store.confirm_publish(name, grant.identity, self._grant_timeout_ms)
        return None


def end(app: Celery, entry: str, reason: TaskRevokedError) -> bool:
    """Store REVOKED for a parked message that will not run, and for everything that follows it in its canvas.

    Return False, after a log line, if that fails.
    """
    try:
        parked = ParkedMessage.read(entry)
        task = app.tasks.get(parked.task)
        facts = log_fields(parked.task, parked.task_id)
        if task is None:
            logger.error(
                "%s; the end of task %s[%s] cannot be stored, because this task is not registered here",
                reason, parked.task, parked.task_id, extra=facts,
            )  # fmt: skip
            return False
        store_revoked(task, Context({**parked.raw.headers, **parked.embedded(app)}), reason)
        logger.info("Task %s[%s] is revoked: %s", parked.task, parked.task_id, reason, extra=facts)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        logger.exception("cannot store the end of a parked message: %s", reason)
        return False
    return True
