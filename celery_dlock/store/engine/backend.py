"""The interface of a backend: it reads, commits and wakes. It contains no rule.

The engine does the same for each verb: it opens a lock name, runs the rule over its records, and commits what the rule
changed. A backend either locks the name when it is opened, or finds out at the commit that another transaction has
changed it (:class:`Conflict`). Rules read nothing but the session, so the engine can then run the rule again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ...keys.lock_name import LockName
from ..base import ReleaseListener, ReleaseRequest
from ..model import Acquired, AcquireRequest, Released, Renewal
from ..operator import Place as ListPlace
from ..rules.data import Head, Mark, MarkKind, Place, Waiter
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


@dataclass
class Changes:
    """The changes that a rule has made. A backend writes all of them, or nothing.

    Args:
        head: The new head; None if it did not change. An empty head may be deleted.
        waiters: Waiters that changed, by identity; None: the waiter is deleted.
        marks: Marks that changed, by kind and key; None: the mark is deleted.
        token: The ``next_token`` of the session, if the rule issued it. No later session may have it again.
        wakes: The number of calls to wake, beginning with the one that has waited for the longest time. They wake when
            all changes are visible to them, and never if the commit fails. See ``LockStore.release_listener``.
    """

    head: Head | None = None
    waiters: dict[str, Waiter | None] = field(default_factory=dict)
    marks: dict[tuple[MarkKind, str], Mark | None] = field(default_factory=dict)
    token: int | None = None
    wakes: int = 0

    def __bool__(self) -> bool:
        return bool(self.head or self.waiters or self.marks or self.token or self.wakes)


class Session(Protocol):
    """A transaction on one lock name. It reads what was committed when it began, without its own changes.

    The values that it returns are not changed by the caller. Records that have expired may be among them.
    """

    @property
    def now(self) -> int:
        """The time of the store in microseconds since the epoch, read after the name was locked."""
        ...

    @property
    def next_token(self) -> int:
        """The fencing token of an acquisition in this session: higher than every token of this name that was issued.

        It does not go back if the clock does, after a restore of the data, or after the head was deleted. If the store
        has a clock, it is at least :attr:`now`.
        """
        ...

    @property
    def head(self) -> Head: ...

    def mark(self, kind: MarkKind, key: str) -> Mark | None: ...
    def marks(self, kind: MarkKind) -> dict[str, Mark]:
        """Return all marks of a kind, by key. The engine asks for ``"worker"`` only, which are few."""
        ...

    def waiter(self, identity: str) -> Waiter | None: ...
    def entries(self) -> dict[str, str]:
        """Return all entries, by identity."""
        ...

    def first_in(self, place: Place, most: int, low: int | None, high: int | None) -> list[tuple[str, Waiter]]:
        """Return waiters in a place by score and then by identity, with scores from ``low`` to ``high``, inclusive."""
        ...

    def count_before(self, place: Place, score: int, identity: str) -> int:
        """Return how many waiters of a place precede this score and identity."""
        ...

    def commit(self, changes: Changes) -> None:
        """Write the changes and wake calls. The engine calls this at most once, and then ends the session.

        Raises:
            Conflict: Nothing was written, because another transaction has changed the name.
            ReplyLost: It is unknown whether the changes were written. The engine runs the rule again on fresh data, if
                the verb is safe to send twice.
        """
        ...


class Backend(Protocol):
    """The data of a store.

    A session that is left without a commit, also by an exception, has no effect. Every method that asks the server
    raises :class:`~celery_dlock.errors.StoreUnavailable` if the server did not answer.

    The last three methods are fast paths: one statement in place of a session. A fast path does what the rule does.
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

    def places(self, listed: Listed, after: ListPlace | None, most: int) -> list[ListPlace]:
        """Return the first places behind a place, in their order. What they name may have ended or expired."""
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
