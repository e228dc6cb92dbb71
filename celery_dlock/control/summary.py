"""Counts of everything in the store by task, and the health of the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import StoreUnavailable
from .scanning import scan_all

if TYPE_CHECKING:
    from ..store.operator import OperatorStore
    from ..store.operator_model import LockView

__all__ = ["Counts", "Health", "counts", "health"]


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of everything in the store, by task. A ``Lock`` outside any task counts under "".

    Args:
        locks: Locks that are held, granted or kept.
        waiting: Waiters. All waiters of a lock count for the task of the first one.
        dead_letters: Dead letters.
        unknown_outcomes: Runs whose process died (``once_per``).
        claims: Claims of published messages (``unique``).
        oldest_hold: The age in seconds of the oldest lock that is held or kept.
        oldest_wait: The age in seconds of the oldest waiter.
        oldest_unknown: The age in seconds of the oldest unknown outcome.
        without_expiry: The number of locks, run marks and claims that lack their expiry.
    """

    locks: Mapping[str, int]
    waiting: Mapping[str, int]
    dead_letters: Mapping[str, int]
    unknown_outcomes: Mapping[str, int]
    claims: Mapping[str, int]
    oldest_hold: Mapping[str, float]
    oldest_wait: Mapping[str, float]
    oldest_unknown: Mapping[str, float]
    without_expiry: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """The state of the store.

    Args:
        up: The store answered.
        stores: The store's locations, without passwords.
        error: The reason for which it did not answer; "" if it did.
        durable: Its data survives a restart, except for at most the last second.
        eviction: The eviction policy of a full store; any other than ``noeviction`` can delete a lock.
        replicas: The smallest number of replicas of one of its servers; None if it is unknown.
        clock_offsets: Seconds by which the clock of each server is ahead of this host's, by its address.
        polls: Calls that wait for a lock look whether it is free. No release can wake them.
    """

    up: bool
    stores: Sequence[str]
    error: str = ""
    durable: bool = False
    eviction: str = ""
    replicas: int | None = None
    clock_offsets: Mapping[str, float] = field(default_factory=dict)
    polls: bool = False


def counts(store: OperatorStore, each: Callable[[LockView], object]) -> Counts:
    """Return the numbers of everything in a store.

    Args:
        store: The store.
        each: Called with the view of each name that is locked or claimed.
    """
    now = store.now()
    locks, claims, waiting, endless = _Tally(), _Tally(), _Tally(), 0
    for view in scan_all(store, ("held", "granted", "kept", "claimed")):
        each(view)
        endless += view.without_expiry
        if view.holder:
            # The age of a grant is no age of a hold.
            locks.add(view.holder.task, None if view.holder.state == "granted" else view.holder.since)
        if view.claim:
            claims.add(view.claim.task)
    for name in store.queues():
        queue = store.list_waiters(name, 1)
        for waiter in queue.waiters:
            waiting.add(waiter.task, waiter.since, queue.count)
    dead, unknown = _Tally(), _Tally()
    for letter in store.dead_letters():
        dead.add(letter.task)
    for run in (run for run in store.unsettled_runs() if run.state == "unknown"):
        unknown.add(run.task, run.since)
    return Counts(
        locks.number,
        waiting.number,
        dead.number,
        unknown.number,
        claims.number,
        locks.ages(now),
        waiting.ages(now),
        unknown.ages(now),
        endless,
    )


def health(store: OperatorStore, stores: Sequence[str]) -> Health:
    """Return the state of a store."""
    try:
        info = store.info()
        offsets = store.clock_offsets()
    except StoreUnavailable as error:
        return Health(up=False, stores=stores, error=str(error))
    return Health(
        up=True,
        stores=stores,
        durable=info.durable,
        eviction=info.eviction,
        replicas=info.replicas,
        clock_offsets=offsets,
        polls=info.polls,
    )


class _Tally:
    """The number of things of each task, and the earliest time of each task."""

    def __init__(self) -> None:
        self.number = Counter[str]()
        self._oldest: dict[str, float] = {}

    def add(self, task: str, since: float | None = None, count: int = 1) -> None:
        self.number[task] += count
        if since is not None:
            self._oldest[task] = min(since, self._oldest.get(task, since))

    def ages(self, now: float) -> dict[str, float]:
        return {task: max(0.0, now - since) for task, since in self._oldest.items()}
