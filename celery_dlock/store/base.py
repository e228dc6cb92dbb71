"""The store contract. The other packages use a lock store only through these protocols."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from ..errors import ReplyLost, ReplyTimeout
from ..keys.lock_name import LockName
from .holder_model import Holder
from .model import Acquired, AcquireRequest, Refusal, Released, Renewal, RenewalResult, Requester

__all__ = [
    "LockStore",
    "ReleaseListener",
    "ReleaseRequest",
    "call_again_if_reply_lost",
]

T = TypeVar("T")

#: The longest release request, in characters, that fits into a lease record beside the longest name.
MAX_TEXT_LENGTH: Final = 1200
_NO_REQUESTER: Final = Requester.of(None, None, "", 0).text


class ReleaseRequest(NamedTuple):
    """The request to end an acquisition.

    Args:
        final: The run has ended for good: its result is stored, and its message is or will be acknowledged. If copies
            of the message may exist, set the done mark.
        identity: The digest of the message's :class:`~celery_dlock.store.model.Identity`; "" outside of a message.
        used_ms: Milliseconds that the run mark of a success is kept (``once_per``); 0: the run did not succeed.
        requester: The requester of a successful run: the text of a :class:`~celery_dlock.store.model.Requester`.
        outcome_unknown: It is unknown whether the acquire took effect. It may still arrive, so leave a tombstone that
            refuses it. This is not the unknown outcome of a body (``once_per``).
        queue: The task's policy is to queue, so the lock is expected to have waiters.
        once: The acquisition has a run mark (``once_per``), and the body's process is alive. If the run did not
            succeed, the release frees the name, or restores the mark of an earlier run whose outcome is unknown.
        tick: The due time of the schedule entry that this run serves (``once_per="tick"``); "" without a tick.
        seed: The text from which ``lease.idempotency_key`` of this run was made.
        window_ms: Milliseconds that the run mark keeps the seed if the run did not succeed.
        reserved_for: The identity of the retry that the lock is reserved for (``keep_on_retry``); "" for none.
        reserved_ms: Milliseconds that the reservation lasts at most.
        replace: Under ``on_conflict="replace"``: ``"ended"`` if the body ended by itself, ``"stopped"`` if a newer call
            stopped it; "" under every other policy.
        rolled_back: With ``outcome_unknown``: the body did not begin, so ``min_hold`` does not apply.
    """

    final: bool = False
    identity: str = ""
    used_ms: int = 0
    requester: str = ""
    outcome_unknown: bool = False
    queue: bool = False
    once: bool = False
    tick: str = ""
    seed: str = ""
    window_ms: int = 0
    reserved_for: str = ""
    reserved_ms: int = 0
    rolled_back: bool = False
    replace: str = ""

    @property
    def of_dead_child(self) -> bool:
        """Whether the watchdog releases the lock of a body whose pool child has died. Its end may still be stored."""
        return self.outcome_unknown and not self.rolled_back

    @property
    def text(self) -> str:
        """The request as JSON, for a release that is delegated to the watchdog."""
        text = json.dumps(self)
        # A lease record has limited space. If the text is too long, drop the requester.
        return text if len(text) <= MAX_TEXT_LENGTH else json.dumps(self._replace(requester=_NO_REQUESTER))

    @classmethod
    def from_text(cls, text: str) -> ReleaseRequest:
        """Parse :attr:`text`. If a killed writer left it damaged, only release the lock, and leave a tombstone."""
        try:
            return cls(**dict(zip(cls._fields, json.loads(text), strict=True)))
        except (ValueError, TypeError):
            return cls(outcome_unknown=True)


def call_again_if_reply_lost(call: Callable[..., T], *args: Any) -> T:
    """Call the store, and once more if the connection was lost before the reply.

    Only for calls that are safe to send twice. A call that timed out is not repeated: it may take as long again.

    Raises:
        ReplyLost: The second reply was lost too, or the first call timed out.
    """
    try:
        return call(*args)
    except ReplyTimeout:
        raise
    except ReplyLost:
        return call(*args)


class ReleaseListener(Protocol):
    """A listener for releases of one lock. Each release wakes the caller that has waited for the longest time."""

    def wait(self, timeout: float) -> bool:
        """Block at most ``timeout`` s. Return whether a release woke this caller. In both cases, try the lock again.

        Raises:
            StoreUnavailable: No connection could be opened, or the store refused.
        """
        ...

    def pass_on(self) -> None:
        """Wake the next caller. Call this if this one was woken, but will neither take the lock nor wait any longer.

        Never raises because of the store. If the store does not answer, the other callers poll.
        """
        ...


class LockStore(Protocol):
    """The store of locks.

    For each lock name, a call takes effect as a whole or not at all. Every command is safe to send twice: if a reply
    is lost, the store or the caller repeats it with equal arguments. A lost race is a result, not an error.

    An acquisition is the text ``owner.number``. Each new acquire has a new number. Every method that sends a command
    raises :class:`~celery_dlock.errors.StoreUnavailable` if the store did not execute the command. If it is unknown
    whether the store did, the method raises the subclass :class:`~celery_dlock.errors.ReplyLost`.
    """

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Refusal:
        """Take the lock, or return why it was refused. If the request has a queue entry, park a message that must wait.

        Safe to send twice: an acquisition that holds the lock already gets the same token again. Otherwise the first of
        these answers applies: ``Tombstoned``, ``Duplicate``, ``Used``, ``Held`` (under the queue policy also ``Queued``
        or ``Parked``), ``Unknown``, quarantine, ``Acquired``.

        Args:
            name: The lock name.
            acquisition: The acquisition that is to hold the lock.
            ttl_ms: Milliseconds that the lock is held without a renewal.
            request: The caller, its message, and the task's options.

        Raises:
            InvalidLockOptions: The request is one of the queue policy, and this store has no queues.
            NotConfirmed: Too few servers confirmed the write (``dlock_durability``). Release the acquisition.
            StoreQuarantined: The store may have lost leases, and grants nothing new for a while.
        """
        ...

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[RenewalResult]:
        """Move the deadlines of leases, and set ``Renewal.fields``. Never creates a lock or shortens a lease.

        Args:
            renewals: The leases to renew.
            within: Seconds after which a reply is of no use; None: the store's timeout.

        Returns:
            One result for each renewal. True: renewed. A ``StopRequest``: renewed, and the holder is to stop.
            False: the acquisition does not hold the lock. None: the lock's server did not answer or refused, or too
            few servers confirmed the renewal. If no server answers, this raises.
        """
        ...

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        """End an acquisition, set its marks, and grant the lock to the next waiter.

        If another acquisition holds the lock, the lock does not change, but the marks are set. If too few servers
        confirm the marks (``dlock_durability``), the release still counts. The store logs the first such case.
        """
        ...

    def shard(self, name: LockName) -> int:
        """Return the number of the lock's shard, less than :data:`~.circuit_breaker.SHARDS`. Sends nothing.

        Shards are servers that fail independently. A number is a hash, so two shards may have the same one (rarely).
        """
        ...

    def inspect(self, name: LockName) -> Holder | None:
        """Return the holder of the lock; None if the lock is free."""
        ...

    def release_listener(self, name: LockName) -> ReleaseListener:
        """Return a listener for releases of the lock.

        A release wakes a caller only if callers may wait: an acquire with ``notify`` was refused, or the holder itself
        had waited. If no caller waits at that moment, the wake-up is kept for 2 s. So a caller that was refused and
        then begins to wait misses no release in between.
        """
        ...

    def close(self) -> None:
        """Close all connections of this process. The store may be used again afterwards."""
        ...
