"""Carries a granted message from the store to its broker."""

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
from ..utils.log import logger
from .broker_identity import broker_of
from .message import RepublishHeader, next_count, publish_parked
from .parked import ParkedMessage
from .results import store_revoked

if TYPE_CHECKING:
    from celery import Celery

    from ..store.base import QueueStore

__all__ = ["GrantPublisher", "end"]


#: Names of which one process remembers that it warned of their next message's broker.
TOLD: Final = 10_000
#: Seconds for which a process leaves a lock to the workers of another broker, once it has met a message of theirs: more
#: than they need to look, and less than 2 s, because the message behind may be its own.
LEFT_FOR: Final = 1.5


class GrantPublisher:
    """Publishes messages whose turn it is.

    A grant that does not get through stays due: a sweep hands it out again.

    Args:
        app: Whose broker to use.
        store: Where the queues live.
        turn: Seconds from the publication until the grant is due.
        producer: Opens a connection to the broker.
        broker: What identifies the broker; None: its URL without user and password.
        monitored_as: The worker's node name while it sends monitor events; else None.
    """

    def __init__(
        self,
        app: Celery,
        store: QueueStore,
        turn: float,
        producer: Callable[[], AbstractContextManager[Any]],
        broker: str | None = None,
        monitored_as: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._app = app
        self._store = store
        self._turn_ms = round(turn * 1000)
        self._producer = producer
        self._monitored_as = monitored_as
        # Not a cached property: before Python 3.12 that has one lock for all processes of a fork.
        self._broker = broker
        #: Names of which it said that a message of another broker comes next, and when it last left one to others.
        self._told: dict[LockName, float] = {}

    @property
    def broker(self) -> str:
        """What identifies the broker that the app publishes to (``dlock_broker``)."""
        if self._broker is None:
            self._broker = broker_of(self._app)
        return self._broker

    def publish_next(self, name: LockName, grant: Grant | None) -> bool:
        """Publish the granted message; what cannot run any more ends here, and the turn passes on.

        Never raises for the store's or the broker's sake; a soft time limit may strike here as anywhere. False if the
        broker did not take the message.
        """
        try:
            with no_fork():
                while grant is not None:
                    grant = self._carry(name, grant)
        except StoreUnavailable as error:
            logger.warning("%s: hand-off failed, the queue sweeper will retry it: %s", name, error)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001  # kombu's transports raise errors of their own libraries
            logger.warning("%s: hand-off failed at the broker, the queue sweeper will retry it: %r", name, error)
            if grant is not None:
                self._keep(name, grant)
            return False
        return True

    def remove_waiter(self, name: LockName, identity: str, reason: str = "") -> None:
        """Take a waiter out of the queue; no copy of it will run.

        Args:
            name: Of the lock.
            identity: The digest of the waiter's identity.
            reason: Why it ends REVOKED here; "": its end is stored already.

        Raises:
            StoreUnavailable: It may wait still.
        """
        with no_fork():
            self.publish_next(name, self._taken_out(name, identity, reason))

    def evict(self, name: LockName, waiter: Grant, error: TaskRevokedError) -> None:
        """End a waiter that was taken out; one whose end cannot be stored stays among the dead letters."""
        try:
            with no_fork():
                if end(self._app, waiter.entry, error):
                    self._taken_out(name, waiter.identity)
                    self._give_claim_up(name, waiter.entry)
                    self._tell_monitors(ParkedMessage.read(waiter.entry).task_id)
        except StoreUnavailable as away:
            logger.warning("%s: a message that has ended is still among the dead letters: %s", name, away)

    def _tell_monitors(self, task_id: str) -> None:
        """Send the end of a waiter that never started: monitors have it as RETRY since it was parked."""
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
            logger.debug("cannot send task-revoked of a waiter that ended: %r", error)

    def _give_claim_up(self, name: LockName, entry: str) -> None:
        headers = ParkedMessage.read(entry).raw.headers
        identity = Identity(headers["id"], headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0)
        self._store.unclaim(name, identity.task_id, identity.generation)

    def _taken_out(self, name: LockName, identity: str, reason: str = "") -> Grant | None:
        taken = self._store.remove_waiter(name, identity, uuid.uuid4().hex, ended=not reason)
        if taken.entry and reason:
            self.evict(name, Grant(identity, taken.entry), TaskRevokedError(f"{name}: {reason}"))
        return taken.granted

    def _leave_to_its_broker(self, name: LockName, grant: Grant, broker: str) -> None:
        if name not in self._told:
            if len(self._told) >= TOLD:
                self._told.clear()
            logger.warning(
                "%s: the next message was parked under the broker %s, and this process publishes to %s; it waits for a "
                "worker of that broker and becomes a dead letter if none comes. "
                "If both are one broker, set dlock_broker=%r",
                name, broker, self.broker, broker,
            )  # fmt: skip
        self._told[name] = time.monotonic()
        present = self._store.has_workers(broker)
        self._store.pass_on(name, grant, foreign=True, present=present)

    def left_to_others(self, name: LockName) -> bool:
        """Return whether this process has just left this lock's next message to the workers of another broker.

        They would find it taken each time that this process looks first.
        """
        return time.monotonic() - self._told.get(name, -LEFT_FOR) < LEFT_FOR

    def _keep(self, name: LockName, grant: Grant) -> None:
        """Note that a worker of the message's own broker was here, so that it does not become a dead letter."""
        try:
            self._store.pass_on(name, grant, foreign=False)
        except StoreUnavailable as error:
            logger.debug("%s: %s", name, error)

    def _carry(self, name: LockName, grant: Grant) -> Grant | None:
        try:
            parcel = ParkedMessage.read(grant.entry)
        except ValueError:
            # Without its traceback: that says nothing of whose message it is.
            where = self._store.dead_letters_at(name)
            logger.error("%s: a parked message cannot be read; see the dead letters, %s", name, where)  # noqa: TRY400
            return self._store.remove_waiter(name, grant.identity, uuid.uuid4().hex, bury=True).granted
        if parcel.broker != self.broker:
            self._leave_to_its_broker(name, grant, parcel.broker)
            return None
        # Who does not know its task publishes it all the same: the worker that gets it ends it.
        if parcel.expired and parcel.task in self._app.tasks:
            return self._taken_out(name, grant.identity, "expired while it waited")
        carried = RepublishHeader(
            parcel.rank_us, next_count(parcel.conflict_retries), grant.turn, redelivered=parcel.redelivered
        )
        try:
            publish_parked(self._app, self._producer, parcel.raw, grant.identity, carried)
        except Unpublishable:
            # No later attempt could publish it, and the name would be blocked for ever.
            where = self._store.dead_letters_at(name)
            logger.exception("%s: a parked message cannot be published; see the dead letters, %s", name, where)
            return self._store.remove_waiter(name, grant.identity, uuid.uuid4().hex, bury=True).granted
        self._store.published(name, grant.identity, self._turn_ms)
        return None


def end(app: Celery, entry: str, reason: TaskRevokedError) -> bool:
    """Store REVOKED for a parked message that will not run, and for all that follows it. False, and said, if not."""
    try:
        parcel = ParkedMessage.read(entry)
        task = app.tasks.get(parcel.task)
        if task is None:
            logger.error("%s; its end cannot be stored, for %s is not registered here", reason, parcel.task)
            return False
        store_revoked(task, Context({**parcel.raw.headers, **parcel.embedded(app)}), reason)
        logger.info("Task %s[%s] is revoked: %s", parcel.task, parcel.task_id, reason)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        logger.exception("cannot store the end of a parked message: %s", reason)
        return False
    return True
