"""The lease of a held lock, and the objects that replace it in calls without a lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import DLockError, LockLost, StoreUnavailable
from ..keys.lock_name import idempotency_key
from ..options.durations import Seconds, seconds_within
from ..store.base import ReleaseRequest
from ..store.model import Acquired
from ..utils.clock import Clock
from .events import unanswered
from .lease_table import LeaseRecord

if TYPE_CHECKING:
    from .client import LockClient
    from .owner import OwnerContext

__all__ = ["BypassLease", "Lease", "NullLease", "drift_margin", "loss_grace"]


def drift_margin(ttl: float) -> float:
    """Return by how many seconds this process shortens a lease of ``ttl`` seconds, to allow for clock drift.

    Source: https://redis.io/docs/latest/develop/use/patterns/distributed-locks/ (1 % of the ttl and 2 ms).
    """
    return ttl * 0.01 + 0.002


def loss_grace(ttl: float) -> float:
    """Return how many seconds before its end a lease counts as lost, if no renewal was confirmed.

    The holder needs this time to stop: its process may not be scheduled at once.
    """
    return min(0.2, ttl * 0.1)


class Lease:
    """The right of one execution, or of one ``Lock`` holder, to the lock ``name`` until a deadline.

    A lease can end before the work does, if the store lost it, the process was paused or the network was cut. So call
    :meth:`ensure` before a step that must not overlap with another run, and pass :attr:`token` to the resource.

    Attributes:
        name: The lock name.
        owner: The owner: one delivery of one message, or one thread.
        token: The fencing token. It grows with every acquisition of the name.
        ttl: Seconds from a renewal to the end of the lease.
        hold_count: The number of times that the owner has entered the lock and not left it.
        task: The name of the task that holds the lease, or None.
        task_id: The id of that task, or None.
        replaced_by: The task id of the newer call that replaces this one, once a renewal has told it; else None.
        after_crash: True if an earlier run (``once_per``) died and may have done its work. Check before repeating it.
        local: False for a lease in the store. True if the body holds its lock on this machine only
            (``on_store_error="local"``).
        seat: The seat that the lease holds, from 0 to ``limit`` - 1; 0 without ``limit``. No two holders of a name have
            the same seat. Tokens of different seats are not comparable.
    """

    token: int | None
    local = False
    hold_count = 1
    over = False
    releasing = False
    #: The release request of a nested run that succeeded (``once_per``). The outermost release stores its run mark.
    inner_use: ReleaseRequest | None = None
    #: The end of a success (``once_per``) of the run that took the lock. :meth:`settle` stores its run mark.
    success: ReleaseRequest | None = None
    #: A transaction decides whether the run is a success (:meth:`settle`). The release must not.
    settled = False
    #: Makes the error that :meth:`ensure` raises when a newer call replaces this one; None: it cannot be replaced.
    stop_error: Callable[[str, str, str | None], Exception] | None = None
    #: The task id of the call that replaces this one, once the store has told it.
    replaced_by: str | None = None
    #: When the lock was taken, on the monotonic clock. Set while metrics are on.
    taken_at = 0.0

    def __init__(
        self,
        record: LeaseRecord,
        acquired: Acquired,
        clock: Clock,
        client: LockClient,
        context: OwnerContext,
    ) -> None:
        self.token, _, self.rank_us, self.seed, self.after_crash, self.seat = acquired
        self.record = record
        self.lock_name = record.name
        self.owner = context.owner
        self.task = context.task
        self.task_id = context.task_id
        self.pid = os.getpid()
        self._clock = clock
        #: The lock client that acquired the lease, and so the only one that can release it.
        self.client = client

    def __repr__(self) -> str:
        return f"<Lease {self.name} token={self.token} remaining={self.remaining():.3f}>"

    @property
    def idempotency_key(self) -> str:
        """The idempotency key, 32 hexadecimal digits by which a gateway recognizes a repetition.

        It stays the same until a run of the name succeeds and its ``once_per`` period is over. A failure, a retry or
        a crash does not change it. ``task.forget()`` changes it.

        Raises:
            DLockError: The task has no ``once_per``, or this run is nested in a lock that another task acquired.
        """
        if not self.seed:
            raise DLockError(f"{self.name}: no idempotency key: expected a task with once_per that acquired this lock")
        return idempotency_key(self.name, self.seed)

    @property
    def name(self) -> str:
        """The lock name."""
        return self.lock_name.text

    @property
    def acquisition(self) -> str:
        """The acquisition id: the owner and the number of this acquisition."""
        return self.record.acquisition

    @property
    def ttl(self) -> float:
        """Seconds from a renewal to the end of the lease."""
        return self.record.ttl

    @property
    def held(self) -> bool:
        """True while the lease is known to be held."""
        return self.remaining() > 0

    @property
    def lost(self) -> bool:
        """True if the lease was found to be over before its holder released it."""
        return self.record.lost

    @property
    def replaced(self) -> bool:
        """True if a newer call has asked this one to stop (``on_conflict="replace"``). Found at a renewal."""
        return self.record.replaced

    def watch_for_stop(self, error: Callable[[str, str, str | None], Exception]) -> None:
        """Learn from renewals whether a newer call replaces this one. ``ensure()`` then raises ``error``."""
        self.stop_error = error
        self.record.set_stoppable()

    def remaining(self) -> float:
        """Return the seconds until the lease ends if it is not renewed; 0 if it is released or lost."""
        if self.over or self.record.lost:
            return 0.0
        return max(0.0, self.record.deadline - self._clock.monotonic())

    def ensure(self) -> None:
        """Renew the lease, or raise if it is over.

        If the store does not answer and the lease has time left, return without a renewal.

        Raises:
            LockLost: The lease is over, or is about to end and the store does not answer. Stop the work, because
                another call may run.
            Replaced: A newer call replaces this one (``on_conflict="replace"``). Stop the work.
        """
        if not self.over and not self.record.lost:
            try:
                if self.client.renew(self, self.ttl):
                    if self.stop_error is not None and self.record.replaced:
                        reason = f"{self.name}: replaced by {self.replaced_by}"
                        raise self.stop_error(reason, self.name, self.replaced_by)
                    return
            except StoreUnavailable as error:
                if self.remaining() > loss_grace(self.ttl):
                    return
                self.client.lose(self, unanswered(error))
        raise LockLost(f"the lease of {self.name} is over")

    def extend(self, seconds: Seconds) -> None:
        """Renew the lease for at least ``seconds`` (or a ``timedelta``) from now. This never shortens it.

        Raises:
            LockLost: The lease is over.
            StoreUnavailable: The store did not answer. The lease is unchanged.
        """
        seconds = seconds_within("extend: seconds", seconds, 0.001)
        if self.over or self.record.lost or not self.client.renew(self, seconds):
            raise LockLost(f"the lease of {self.name} is over")

    def guard(self, connection: Any) -> None:
        """Guard the open transaction of a database connection, as its first statement.

        The transaction then commits before another call takes the lock, also if the lease ends while it is open: the
        other call waits for it. Needs ``dlock_url`` to be the database of the connection (PostgreSQL, MariaDB). A
        guard in a savepoint ends with the savepoint's rollback, so call it outside of inner ``atomic()`` blocks.
        MariaDB's error 1213 (deadlock) in a later statement ends the guard too: run the whole transaction again.

        Args:
            connection: Django's ``connection``, a ``Session`` or ``Connection`` of SQLAlchemy, or one of psycopg or
                PyMySQL.

        Raises:
            LockLost: The lease is over. Roll the transaction back, because another call may run.
            GuardRefused: The locks are in another database, no transaction is open, or it is read-only.
            StoreUnavailable: The store did not answer, so nothing is guarded.
        """
        self._guard(connection)

    def settle(self, connection: Any) -> None:
        """Guard an open transaction as :meth:`guard` does, and let it mark this run as a success (``once_per``).

        The mark commits with the rows of the transaction. So they are written exactly once, whatever is killed: after
        the commit no later call runs, and without it the next call may run.

        Args:
            connection: As for :meth:`guard`.

        Raises:
            DLockError: The task has no ``once_per``, or this run is nested in a lock that another task acquired.
            LockLost: As for :meth:`guard`; also ``GuardRefused`` and ``StoreUnavailable``.
        """
        if self.success is None or self.hold_count > 1:
            raise DLockError(f"{self.name}: nothing to settle: expected a task with once_per that acquired this lock")
        self._guard(connection, self.success)
        self.settled = True

    def _guard(self, connection: Any, settles: ReleaseRequest | None = None) -> None:
        if self.over or self.record.lost or not self.client.guard(self, connection, settles):
            raise LockLost(f"the lease of {self.name} is over")


class _NoLease:
    """The common attributes of a lease without a lock."""

    __slots__ = ()

    after_crash = False
    seat = 0
    idempotency_key = ""
    token = None
    hold_count = 0
    held = False
    lost = False
    replaced = False

    def remaining(self) -> float:
        return 0.0

    def ensure(self) -> None:
        return None

    def extend(self, seconds: float) -> None:
        self.ensure()

    def guard(self, connection: Any) -> None:
        self.ensure()

    def settle(self, connection: Any) -> None:
        self.ensure()


class BypassLease(_NoLease):
    """The lease of a body that runs without its lock, because the store did not answer (``on_store_error``).

    It has no token. :meth:`ensure` and :meth:`extend` always raise.

    Attributes:
        name: The name of the lock that the body runs without.
        owner: The owner that would hold the lock.
        local: True if the body holds its lock on this machine only (``on_store_error="local"``).
    """

    __slots__ = ("local", "name", "owner")

    def __init__(self, name: str, owner: str, *, local: bool = False) -> None:
        self.name = name
        self.owner = owner
        self.local = local

    def __repr__(self) -> str:
        return f"<BypassLease {self.name} local={self.local}>"

    def ensure(self) -> None:
        """Raise, because the lock is not held in the store.

        Raises:
            LockLost: Always. Other executions may run at the same time; with :attr:`local`, on other machines.
        """
        if self.local:
            raise LockLost(f"{self.name} is held on this machine only: the store did not answer")
        raise LockLost(f"{self.name} is not held: the store did not answer, and this body runs without its lock")


class NullLease(_NoLease):
    """The lease of a call that takes no lock: a direct call, or any call with ``dlock_enabled=False``.

    It has no token. :meth:`ensure` and :meth:`extend` do nothing.
    """

    __slots__ = ()

    local = False
    name = None
    owner = None

    def __repr__(self) -> str:
        return "<NullLease>"
