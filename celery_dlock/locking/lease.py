"""One held lock: how long it lives, and how its holder finds out."""

from __future__ import annotations

import os
from typing import Protocol

from ..errors import DLockError, LockLost, StoreUnavailable
from ..keys.lock_name import idempotency_key
from ..options.validation import Seconds, seconds_within
from ..store.base import ReleaseRequest
from ..utils.clock import Clock
from .lease_table import LeaseRecord

__all__ = ["BypassLease", "Lease", "NullLease", "Renewer", "drift_margin", "loss_grace"]


def drift_margin(ttl: float) -> float:
    """Seconds by which a lease ends here before it ends in the store: Redlock's allowance for clock drift.

    Source: https://redis.io/docs/latest/develop/use/patterns/distributed-locks/ (1 % of the ttl and 2 ms).
    """
    return ttl * 0.01 + 0.002


def loss_grace(ttl: float) -> float:
    """Seconds before its end from which a lease that the store does not confirm counts as lost.

    Its holder needs them to stop, and its process may not be scheduled at once.
    """
    return min(0.2, ttl * 0.1)


class Renewer(Protocol):
    """Who carries out what a lease asks for."""

    def renew(self, lease: Lease, seconds: float, notes: tuple[tuple[str, str], ...] = ()) -> bool:
        """Move the deadline; false, and the lease is lost, where the store no longer knows it."""
        ...

    def lose(self, lease: Lease, reason: str) -> None:
        """Note, and tell once, that the lease is over."""
        ...


class Lease:
    """The right of one execution (or of one ``Lock`` holder) to the lock ``name``.

    A lease can end before the work does: the store lost it, the process was paused, the network was cut. The holder
    must expect it: call :meth:`ensure` before a step that must not overlap, and hand :attr:`token` to the resource.

    Attributes:
        name: The lock name.
        owner: Whose lease it is: one delivery of one message, or one thread.
        token: The fencing token; grows with every acquisition of the name.
        ttl: Seconds from a renewal to the end.
        hold_count: How often the owner entered and has not left.
        task: The name of the task that holds it, if one does.
        task_id: Its id.
        after_crash: Under ``once_per``: an earlier run died and may have done its work; ask whoever it was done at.
    """

    __slots__ = (
        "_clock",
        "_renewer",
        "acquisition",
        "after_crash",
        "hold_count",
        "inner_use",
        "lock_name",
        "name",
        "over",
        "owner",
        "pid",
        "rank_us",
        "record",
        "releasing",
        "seed",
        "task",
        "task_id",
        "token",
        "ttl",
    )  # fmt: skip

    def __init__(
        self,
        record: LeaseRecord,
        token: int,
        clock: Clock,
        renewer: Renewer,
        *,
        owner: str,
        task: str | None = None,
        task_id: str | None = None,
        rank_us: int = 0,
        seed: str = "",
        after_crash: bool = False,
    ) -> None:
        self.seed = seed
        self.after_crash = after_crash
        self.rank_us = rank_us
        self.record = record
        self.lock_name = record.name
        self.name = record.name.text
        self.owner = owner
        self.task = task
        self.task_id = task_id
        self.acquisition = record.acquisition
        self.ttl = record.ttl
        self.token: int | None = token
        self.hold_count = 1
        self.over = False
        self.releasing = False
        #: The ending of an inner run that used the name up; only the outermost leaving can tell the store.
        self.inner_use: ReleaseRequest | None = None
        self.pid = os.getpid()
        self._clock = clock
        self._renewer = renewer

    def __repr__(self) -> str:
        return f"<Lease {self.name} token={self.token} remaining={self.remaining():.3f}>"

    @property
    def idempotency_key(self) -> str:
        """32 hexadecimal digits for a gateway that knows a repetition by them.

        The same for every run of the name until one succeeds and its ``once_per`` is over: after a failure, a retry and
        a crash too. After ``task.forget()`` it is another.

        Raises:
            DLockError: The task has no ``once_per``, or this run is nested in a lock that another one took.
        """
        if not self.seed:
            raise DLockError(f"{self.name}: there is an idempotency_key only under once_per")
        return idempotency_key(self.name, self.seed)

    @property
    def held(self) -> bool:
        """True while the lease is known to live."""
        return self.remaining() > 0

    @property
    def lost(self) -> bool:
        """True once the lease was found to be over before its holder released it."""
        return self.record.lost

    def remaining(self) -> float:
        """Seconds until the lease ends if nobody renews it; 0 when it is released or lost."""
        if self.over or self.record.lost:
            return 0.0
        return max(0.0, self.record.deadline - self._clock.monotonic())

    def ensure(self) -> None:
        """Ask the store whether the lease lives, and renew it.

        Raises:
            LockLost: The lease is over, or the store has not answered until its deadline: stop, another may run.
        """
        if not self.over and not self.record.lost:
            try:
                if self._renewer.renew(self, self.ttl):
                    return
            except StoreUnavailable as error:
                if self.remaining() > loss_grace(self.ttl):
                    return
                self._renewer.lose(self, f"its deadline came unanswered: {error}")
        raise LockLost(f"the lease of {self.name} is over")

    def extend(self, seconds: Seconds) -> None:
        """Make the lease live at least ``seconds`` (or a ``timedelta``) from now; a renewal never shortens it.

        Raises:
            LockLost: The lease is over.
            StoreUnavailable: The store did not answer; the lease is what it was.
        """
        seconds = seconds_within("extend: seconds", seconds, 0.001)
        if self.over or self.record.lost or not self._renewer.renew(self, seconds):
            raise LockLost(f"the lease of {self.name} is over")


class _NoLease:
    """The attributes of a lease that holds no lock."""

    __slots__ = ()

    after_crash = False
    idempotency_key = ""
    token = None
    hold_count = 0
    held = False
    lost = False

    def remaining(self) -> float:
        return 0.0

    def ensure(self) -> None:
        return None

    def extend(self, seconds: float) -> None:
        self.ensure()


class BypassLease(_NoLease):
    """The lease of a body that runs without its lock, because the store did not answer (``on_store_error="run"``).

    It has no token, and :meth:`ensure` and :meth:`extend` always raise.

    Attributes:
        name: The name of the lock that the body runs without.
        owner: The owner that would hold the lock.
    """

    __slots__ = ("name", "owner")

    def __init__(self, name: str, owner: str) -> None:
        self.name = name
        self.owner = owner

    def __repr__(self) -> str:
        return f"<BypassLease {self.name}>"

    def ensure(self) -> None:
        """Raise.

        Raises:
            LockLost: There is no lock: others may run beside this body.
        """
        raise LockLost(f"{self.name} is not held: the store did not answer, and this body runs without its lock")


class NullLease(_NoLease):
    """The lease of a call that takes no lock: a direct call, or any call with ``dlock_enabled=False``.

    It has no token. :meth:`ensure` and :meth:`extend` do nothing.
    """

    __slots__ = ()

    name = None
    owner = None

    def __repr__(self) -> str:
        return "<NullLease>"
