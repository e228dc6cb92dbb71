"""The interface of a backend: it reads, commits and wakes. It contains no rule.

The engine does the same for each verb: it opens a lock name, runs the rule over its records, and commits what the rule
changed. A backend either locks the name when it is opened, or finds out at the commit that another transaction has
changed it (:class:`Conflict`). Rules read nothing but the session, so the engine can then run the rule again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from ...errors import GuardRefused
from ...keys.lock_name import LockName
from ..base import NO_GUARD, ReleaseListener, ReleaseRequest
from ..model import Acquired, AcquireRequest, Released, Renewal
from ..operator import ListCursor
from ..rules.data import Guard, MarkKind
from ..rules.session import Changes, Session
from ..server_model import StoreInfo

__all__ = ["Backend", "Changes", "Conflict", "Listed", "Session", "Wanted"]

#: ``"name"``: a lock name that has a head. ``"run"``: one of its run marks; the detail is the tick. ``"dead"``: a dead
#: letter that operators see; the detail is the identity. ``"queue"``: a name that a sweep visits.
Listed = Literal["name", "run", "dead", "queue"]


class Conflict(Exception):
    """Another transaction has changed the name since the session was opened. Nothing was written, and no call woken."""


class Wanted(NamedTuple):
    """Data that the rule will read. One round trip can read them with the head. The rule may also read other data.

    Args:
        marks: The kinds and keys of marks.
        waiters: The identities of waiters.
        write: The rule may change data. If false, the session does not commit, so it need not lock the name.
        within: Seconds after which an answer is of no use; None: the timeout of the store.
    """

    marks: tuple[tuple[MarkKind, str], ...] = ()
    waiters: tuple[str, ...] = ()
    write: bool = True
    within: float | None = None


class Backend(Protocol):
    """The data of a store.

    A session that is left without a commit, also by an exception, has no effect. Every method that asks the server
    raises :class:`~celery_dlock.errors.StoreUnavailable` if the server did not answer.

    The last three methods are plain paths: one statement in place of a session. A plain path does what the rule does.
    It returns None if the call is not plain enough for it. Then it has written nothing, and the engine runs the rule.

    Args:
        shown: The address of the store, without secrets, for texts to operators.
        timeout: Seconds after which a call counts as unanswered.
    """

    shown: str
    timeout: float

    def open(self, name: LockName, wanted: Wanted) -> AbstractContextManager[Session]:
        """Begin a transaction on a lock name. The name of a seat (``limit``) has the data of the whole name.

        The engine also stores records of workers here, under names that begin with ``~``. They have no head.
        """
        ...

    def cursors(self, listed: Listed, after: ListCursor | None, most: int) -> list[ListCursor]:
        """Return the cursors of the first entries behind a cursor, in order. An entry may have ended or expired."""
        ...

    def due(self, buckets: Sequence[int], most: int, within_us: int) -> list[LockName]:
        """Return the names whose ``Head.sweeps`` is at most ``within_us`` microseconds from now, the earliest first.

        At most ``most`` of each bucket. One worker calls this twice a second, so it may remove expired data, too.
        """
        ...

    def count(self) -> int:
        """Return about how many lock names there are."""
        ...

    def release_listener(self, name: LockName) -> ReleaseListener:
        """Return a listener for releases of the lock, see :meth:`celery_dlock.store.base.LockStore.release_listener`.

        The name of a seat (``limit``) is that of the whole name.
        """
        ...

    def guard_of(self, connection: Any) -> Callable[[LockName, Guard], bool]:
        """Return what guards the open transaction of a connection of the user. Writes nothing.

        It is called with a lock name and a guard whose token :meth:`Session.commit` has written. It returns whether
        that guard still exists. From then on, :meth:`Session.end_guard` returns false until the transaction has ended.
        It also writes the run mark of the guard, in the transaction. From the commit on, :meth:`Session.mark` returns
        that mark. A session that read an earlier one reads it again after :meth:`Session.end_guard`.

        Raises:
            GuardRefused: The data of this store are not in the database of the connection, or no transaction is open.
        """
        raise GuardRefused(NO_GUARD)

    def now(self) -> float:
        """Return the time of the store, in seconds since the epoch."""
        ...

    def info(self) -> StoreInfo:
        """Return the configuration of the store."""
        ...

    def close(self) -> None:
        """Close all connections of this process. The backend may be used again afterwards."""
        ...

    def acquire_plain(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | None:
        """Take a free lock."""
        return None

    def release_plain(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released | None:
        """End an acquisition that holds the lock, if no other call waits."""
        return None

    def renew_plain(self, renewals: Sequence[Renewal], within: float | None) -> Sequence[bool | None]:
        """Move the deadlines of leases. Each answer is that of :meth:`~celery_dlock.store.base.LockStore.renew`."""
        return [None] * len(renewals)
