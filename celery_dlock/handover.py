"""Carries a granted message from the store to its broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery.app.task import Context
from kombu.exceptions import SerializationError

from .errors import StoreUnavailable
from .fence import apart_from_forks
from .keys import LockKeys, LockName
from .message import Carried, publish_parked
from .parcel import Parcel
from .records import Grant, Publication
from .results import end_revoked
from .voice import logger

if TYPE_CHECKING:
    from celery import Celery

    from .store import QueueStore

__all__ = ["Handover", "end"]


class Handover:
    """Publishes messages whose turn it is.

    A grant that does not get through stays due: a sweep hands it out again.

    Args:
        app: Whose broker to use.
        store: Where the queues live.
        prefix: Of all keys.
        turn: Seconds from the publication until the grant is due.
        producer: Opens a connection to the broker.
    """

    def __init__(
        self,
        app: Celery,
        store: QueueStore,
        prefix: str,
        turn: float,
        producer: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._app = app
        self._store = store
        self._prefix = prefix
        self._turn_ms = round(turn * 1000)
        self._producer = producer
        # Not a cached property: before Python 3.12 that has one lock for all processes of a fork.
        self._broker: str | None = None

    @property
    def broker(self) -> str:
        """Which broker the app publishes to, without its password."""
        if self._broker is None:
            self._broker = str(self._app.connection_for_write().as_uri())
        return self._broker

    def carry(self, name: LockName, grant: Grant | None) -> None:
        """Publish the granted message; what cannot run any more ends here, and the turn passes on.

        Never raises for the store's or the broker's sake; a soft time limit may strike here as anywhere.
        """
        try:
            with apart_from_forks():
                while grant is not None:
                    grant = self._carry(name, grant)
        except StoreUnavailable as error:
            logger.warning("%s: a turn is handed over by the next sweep: %s", name, error)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001  # kombu's transports raise errors of their own libraries
            logger.warning("%s: the broker did not take a message whose turn it is; a sweep will: %r", name, error)

    def take_out(self, name: LockName, identity: str, reason: str = "") -> None:
        """Take a waiter out of the queue; no copy of it will run.

        Args:
            name: Of the lock.
            identity: The digest of the waiter's identity.
            reason: Why it ends REVOKED here; "": its end is stored already.

        Raises:
            StoreUnavailable: It may wait still.
        """
        with apart_from_forks():
            self.carry(name, self._taken_out(name, identity, reason))

    def oust(self, name: LockName, waiter: Grant, reason: str) -> None:
        """End a waiter that was taken out; one whose end cannot be stored stays among the dead letters."""
        try:
            with apart_from_forks():
                if end(self._app, waiter.entry, f"{name}: {reason}"):
                    self._taken_out(name, waiter.identity)
                    self._give_claim_up(name, waiter.entry)
        except StoreUnavailable as error:
            logger.warning("%s: a message that has ended is still among the dead letters: %s", name, error)

    def _give_claim_up(self, name: LockName, entry: str) -> None:
        headers = Parcel.read(entry).raw.headers
        turn = Publication.turn_of(headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0)
        self._store.unclaim(LockKeys.of(self._prefix, name), headers["id"], turn)

    def _taken_out(self, name: LockName, identity: str, reason: str = "") -> Grant | None:
        keys = LockKeys.of(self._prefix, name)
        taken = self._store.take_out(keys, identity, uuid.uuid4().hex, ended=not reason)
        if taken.entry and reason:
            self.oust(name, Grant(identity, taken.entry), reason)
        return taken.granted

    def _carry(self, name: LockName, grant: Grant) -> Grant | None:
        keys = LockKeys.of(self._prefix, name)
        try:
            parcel = Parcel.read(grant.entry)
        except ValueError:
            # Without its traceback: that says nothing of whose message it is.
            logger.error("%s: a parked message cannot be read; see the dead letters, %s", name, keys.dead())  # noqa: TRY400
            return self._store.take_out(keys, grant.identity, uuid.uuid4().hex, bury=True).granted
        if parcel.broker != self.broker:
            logger.debug("%s: the next message belongs to another broker; a worker of that one hands it over", name)
            return None
        # Who does not know its task publishes it all the same: the worker that gets it ends it.
        if parcel.expired and parcel.task in self._app.tasks:
            return self._taken_out(name, grant.identity, "expired while it waited")
        carried = Carried(parcel.rank_us, parcel.tries + 1, grant.turn, redelivered=parcel.redelivered)
        try:
            with self._producer() as producer:
                publish_parked(self._app, producer, parcel.raw, grant.identity, carried)
        except (AttributeError, LookupError, TypeError, ValueError, SerializationError):
            # Not the broker's fault: no later try could cure it, and the name would be blocked for ever.
            logger.exception("%s: a parked message cannot be published; see the dead letters, %s", name, keys.dead())
            return self._store.take_out(keys, grant.identity, uuid.uuid4().hex, bury=True).granted
        self._store.published(keys, grant.identity, self._turn_ms)
        return None


def end(app: Celery, entry: str, reason: str) -> bool:
    """Store REVOKED for a parked message that will not run, and for all that follows it. False, and said, if not."""
    try:
        parcel = Parcel.read(entry)
        task = app.tasks.get(parcel.task)
        if task is None:
            logger.error("%s; its end cannot be stored, for %s is not registered here", reason, parcel.task)
            return False
        end_revoked(task, Context({**parcel.raw.headers, **parcel.embedded(app)}), reason)
        logger.info("Task %s[%s] is revoked: %s", parcel.task, parcel.task_id, reason)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        logger.exception("cannot store the end of a parked message: %s", reason)
        return False
    return True
