"""A model of the queue's scripts in plain Python, for one lock name.

It is written from the invariants and not from the scripts. It is separate from `tests/model` on purpose. That one shows
that the design holds in every order of steps. This one shows that the scripts follow the design. If one model did both,
a mistake in it would hide in the design and in the scripts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.contract.queue_values import ANY, PAST, Ask, Bucket, Granted, Held, Stamp

PUBLISH_WITHIN_US = 5_000_000
#: Waiters with a lost grant that return at one grant, at most.
GROUP = 16

Turn = tuple[str, str, Stamp] | None  # identity, entry, when granted


@dataclass
class Queue:
    """One lock name. Every method is one script, carried out at the time ``now``."""

    bucket: Bucket
    lock: Held | Granted | None = None
    waiting: dict[str, Stamp] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    #: The time until which waiters that lost a grant do not wait.
    later: dict[str, Stamp] = field(default_factory=dict)
    #: Rank and number of the turns that were lost since its last copy came.
    lost: dict[str, tuple[Stamp, int]] = field(default_factory=dict)
    #: Dead letters, and who was taken out until its end is stored.
    dead: dict[str, str] = field(default_factory=dict)
    #: The index of dead letters: since when. A member may be stale.
    indexed: dict[str, Stamp] = field(default_factory=dict)
    #: The waiter that another one evicted.
    ousted: dict[str, str] = field(default_factory=dict)

    # Scripts

    def arrive(self, ask: Ask, now: Stamp) -> tuple[Any, ...]:
        lock, me = self.lock, ask.identity
        if isinstance(lock, Held) and lock.ask.acquisition == ask.acquisition:
            # Only the lock tells, and it keeps no rank.
            return ("acquired", lock.token, ANY)
        if ask.acquisition in self.bucket.gone:
            return ("tombstoned",)
        rank = self._rank(ask, now)
        if self._is_duplicate(ask, rank):
            return ("done", self._end_waiting(ask, now))
        rank = self._place(ask, rank)
        if ask.queues and isinstance(lock, Granted) and lock.identity == me:
            return self._meet_own_turn(lock, ask, rank, now)
        if lock is None and not (ask.queues and self._others_first(me, rank)):
            return self._take(ask, rank, now, known=False)
        return self._wait(ask, rank, now)

    def release(self, ask: Ask, now: Stamp, then: Stamp, *, final: bool, queue: bool) -> tuple[bool, bool, Turn]:
        """``queue``: the keys of the queue are named; else a sweep grants, at the time ``then``."""
        lock, me = self.lock, ask.identity
        ours = isinstance(lock, Held) and lock.ask.acquisition == ask.acquisition
        word = crowded = False
        if isinstance(lock, Held) and ours:
            word, crowded, self.lock = lock.word, lock.crowded, None
        if ask.unsure:
            self.bucket.gone.add(ask.acquisition)
        ends_turn = False
        if final and me and (word or not ours):
            self.bucket.done[me] = now
            if queue:
                self._forget(me)
                ends_turn = self._is_granted(me)
        if not queue:
            told = crowded or self._untold(ask.acquisition)
            return ours, word, self.sweep(ask.acquisition, then, 10**6)[0] if told else None
        if ends_turn:
            return ours, word, self._end_grant(ask.acquisition, now)
        if crowded:
            return ours, word, self._grant(ask.acquisition, now)
        return ours, word, self._untold(ask.acquisition)

    def sweep(self, granter: str, now: Stamp, tries: int) -> tuple[Turn, str]:
        lock, buried = self.lock, ""
        if isinstance(lock, Held):
            lock.crowded = lock.crowded or bool(self.waiting or self.later)
            return None, ""
        if isinstance(lock, Granted):
            early = lock.due != PAST
            if early and (lock.published or lock.granter != granter):
                return None, ""
            if not lock.published:
                lock.due = now._replace(plus=PUBLISH_WITHIN_US)
                # The caller that grants it again is its granter now: that answer may be lost too.
                lock.buried = lock.buried if lock.granter == granter else ""
                lock.granter = granter
                return (lock.identity, self.entries[lock.identity], lock.turn), lock.buried
            buried = self._lose_turn(lock, now, tries)
        told = self._end_grant(granter, now)
        if isinstance(self.lock, Granted):
            self.lock.buried = buried
        return told, buried

    def publish(self, identity: str, now: Stamp) -> bool:
        lock = self.lock
        if not isinstance(lock, Granted) or lock.identity != identity:
            return False
        _, lost = self.lost.get(identity, (None, 0))
        lock.published, lock.due = True, now._replace(plus=self.turn_us * 2**lost)
        return True

    def take_out(self, identity: str, granter: str, now: Stamp, *, dead_letter: bool, ended: bool) -> tuple[str, Turn]:
        lock = self.lock
        if isinstance(lock, Held) and lock.ask.identity == identity:
            return "", None
        entry = self.entries.get(identity) or self.dead.get(identity, "")
        if not dead_letter and (entry or ended):
            self.bucket.done[identity] = now
        if ended:
            self.dead.pop(identity, None)
            self.indexed.pop(identity, None)
        elif entry:
            self._bury(identity, entry, now)
        self._forget(identity)
        if self._is_granted(identity):
            return entry, self._end_grant(granter, now)
        return entry, self._untold(granter)

    #: A turn's length.
    turn_us = 60_000_000

    # Parts

    def _rank(self, ask: Ask, now: Stamp) -> Stamp:
        rank = now if ask.rank is None else ask.rank
        if ask.queues and ask.after is not None and rank <= ask.after:
            rank = ask.after._replace(plus=ask.after.plus + 1)
        return rank

    def _place(self, ask: Ask, rank: Stamp) -> Stamp:
        """A republished message keeps its place; the grant of a waiter is part of the lock."""
        if not ask.queues or ask.identity not in self.entries:
            return rank
        place = self.waiting.get(ask.identity) or self.lost.get(ask.identity, (rank, 0))[0]
        return min(place, rank)

    def _is_duplicate(self, ask: Ask, rank: Stamp) -> bool:
        done = self.bucket.done.get(ask.identity)
        return done is not None and (ask.redelivered or rank <= done)

    def _end_waiting(self, ask: Ask, now: Stamp) -> Turn:
        """It is not to run: it waits no more, and its grant passes to the next one."""
        if not ask.queues:
            return None
        self._forget(ask.identity)
        if not self._is_granted(ask.identity):
            return self._untold(ask.acquisition)
        return self._end_grant(ask.acquisition, now)

    def _meet_own_turn(self, lock: Granted, ask: Ask, rank: Stamp, now: Stamp) -> tuple[Any, ...]:
        if lock.turn == ask.turn:
            return self._take(ask, rank, now, known=True)
        told = self._untold(ask.acquisition)
        return ("parked", rank, 1 if told else 0, told, self._untold_ousted(ask.identity))

    def _wait(self, ask: Ask, rank: Stamp, now: Stamp) -> tuple[Any, ...]:
        lock = self.lock
        duplicate = isinstance(lock, Held) and bool(ask.identity) and lock.ask.identity == ask.identity
        if isinstance(lock, Held) and duplicate:
            lock.word = True
        if duplicate or not ask.queues:
            return self._refused("held", ask, (duplicate, rank))
        return self._park(ask, rank, now)

    def _is_granted(self, identity: str) -> bool:
        return isinstance(self.lock, Granted) and self.lock.identity == identity

    def _others_first(self, me: str, rank: Stamp) -> bool:
        return me in self.entries or any(other < rank for other in self.waiting.values())

    def _take(self, ask: Ask, rank: Stamp, now: Stamp, *, known: bool) -> tuple[Any, ...]:
        reused = self.bucket.done.pop(ask.identity, None) is not None
        word = ask.redelivered or ask.republished or known or reused
        if ask.queues and word:
            self._forget(ask.identity)
            self.dead.pop(ask.identity, None)
        crowded = ask.queues and bool(self.waiting or (self.later and word))
        wake = bool(self.lock and self.lock.wake)  # of the grant that it takes
        self.lock = Held(ask, now, word, crowded, wake=wake)
        self.bucket.last = now
        return ("acquired", now, rank)

    def _refused(self, kind: str, ask: Ask, facts: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.lock and ask.waits:
            self.lock.wake = True
        return (kind, *facts)

    def _park(self, ask: Ask, rank: Stamp, now: Stamp) -> tuple[Any, ...]:
        me = ask.identity
        count = len(self.waiting) + len(self.later)
        full = me not in self.entries and ask.limit and count >= ask.limit
        if not ask.entry or (full and not ask.evicts):
            return self._refused("queue", ask, (count, rank, self.lock is not None))
        ousted = self._untold_ousted(me)
        if full:
            oldest = self._by_rank()[0] if self.waiting else min(self.later, key=lambda one: (self.later[one], one))
            at = self.waiting[oldest] if self.waiting else self.lost[oldest][0]
            if at > rank:
                return ("parked", rank, 0, None, (me, ask.entry))
            ousted = oldest, self.entries[oldest]
            self._forget(oldest)
            self.dead[oldest], self.ousted[me] = ousted[1], oldest
        self.dead.pop(me, None)
        self.later.pop(me, None)
        self.lost.pop(me, None)
        self.entries[me], self.waiting[me] = ask.entry, rank
        if isinstance(self.lock, Held):
            self.lock.crowded = True
        told = self._grant(ask.acquisition, now) if self.lock is None else self._untold(ask.acquisition)
        position = self._by_rank().index(me) + 1 if me in self.waiting else 1
        return ("parked", rank, position, told, ousted)

    def _by_rank(self) -> list[str]:
        return sorted(self.waiting, key=lambda one: (self.waiting[one], one))

    def _grant(self, granter: str, now: Stamp) -> Turn:
        """The lock is free: reserve it for the lowest rank. A waiter that lost a grant counts after its time."""
        for back in sorted(one for one, until in self.later.items() if until == PAST)[:GROUP]:
            self.waiting[back] = self.lost[back][0]
            del self.later[back]
        if not self.waiting:
            return None
        head = self._by_rank()[0]
        rank = self.waiting.pop(head)
        due = now._replace(plus=PUBLISH_WITHIN_US)
        self.lock = Granted(head, rank, now, due, granter)
        return head, self.entries[head], now

    def _end_grant(self, granter: str, now: Stamp) -> Turn:
        """End the grant, if there is one. The next one has its mark: a caller that waits must still be woken."""
        ended, self.lock = self.lock, None
        told = self._grant(granter, now)
        if isinstance(ended, Granted) and isinstance(self.lock, Granted):
            self.lock.wake = ended.wake
        return told

    def _untold(self, granter: str) -> Turn:
        """The grant that this one gave, until its message is published: the answer may have been lost."""
        lock = self.lock
        if isinstance(lock, Granted) and lock.granter == granter and not lock.published:
            return lock.identity, self.entries[lock.identity], lock.turn
        return None

    def _untold_ousted(self, newcomer: str) -> tuple[str, str] | None:
        """The waiter that it evicted, until that one's end is stored."""
        whom = self.ousted.get(newcomer, "")
        return (whom, self.dead[whom]) if whom in self.dead else None

    def _lose_turn(self, lock: Granted, now: Stamp, tries: int) -> str:
        _, before = self.lost.get(lock.identity, (None, 0))
        if before + 1 >= tries:
            self._bury(lock.identity, self.entries[lock.identity], now)
            self._forget(lock.identity)
            return lock.identity
        self.lost[lock.identity] = lock.rank, before + 1
        alone = not self.waiting and not self.later
        self.later[lock.identity] = PAST if alone and not before else now._replace(plus=self.turn_us * 2**before)
        return ""

    def _bury(self, identity: str, entry: str, now: Stamp) -> None:
        if identity not in self.dead or identity not in self.indexed:
            self.indexed[identity] = now
        self.dead[identity] = entry

    def _forget(self, identity: str) -> None:
        for place in (self.waiting, self.entries, self.later, self.lost, self.ousted):
            place.pop(identity, None)
