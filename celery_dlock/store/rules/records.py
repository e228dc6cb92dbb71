"""The records of one lock name, as the rules read and write them."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, Final, TypeVar

from ...keys.lock_name import ONE_LOCK, UNKNOWN_SEATS, LockName, split_seat
from ..acquisition import GUARDED
from .data import (
    Claim,
    LockRecord,
    Mark,
    MarkKind,
    NewestCall,
    QueuePart,
    ReplacedCalls,
    SeatsRecord,
    Timed,
    Waiter,
)
from .session import Changes, Session

__all__ = ["DONE_MS", "TOMBSTONE_MS", "Records"]

T = TypeVar("T")

#: Life of a done mark in milliseconds: longer than the time in which a broker redelivers a message.
DONE_MS: Final = 24 * 3600 * 1000
#: Life of a tombstone in milliseconds: longer than a command can be delayed.
TOMBSTONE_MS: Final = 10 * 60 * 1000
#: Milliseconds after which calls and sweeps look again whether a guarded transaction has ended.
GUARDED_MS: Final = 200

_NO_WAITER: Final = Waiter()


class Records:
    """The records of one lock name, within one transaction. Expired records do not exist.

    Lives are milliseconds from now. A life of None means that the record does not expire.

    Of a name with seats (``limit``), the lock is that of one seat. All other records are those of the name.

    Args:
        session: The transaction. It is only read.
        name: The lock name.
    """

    def __init__(self, session: Session, name: LockName) -> None:
        self._session = session
        #: The time of the store, in microseconds since the epoch. It is the same for the whole transaction.
        self.now = session.now
        #: The seat whose lock these records have.
        _, self.seat_number = split_seat(name)
        #: The sweep of a name with seats visits all of them.
        self._swept = ONE_LOCK if name.seats == ONE_LOCK else UNKNOWN_SEATS
        head = session.head
        self._head = replace(head, locks=dict(head.locks), sweeps=dict(head.sweeps), guards=dict(head.guards))
        #: The waiters that were read, as they are now.
        self._waiters: dict[str, Waiter] = {}
        self._read: dict[str, Waiter] = {}
        self._changes = Changes()

    def changes(self) -> Changes:
        """Return what has changed."""
        made, head = self._changes, self._head
        if head != self._session.head:
            # A backend need not remove expired records: the next change of the head does.
            for seat in [seat for seat, lock in head.locks.items() if not self._alive(lock)]:
                del head.locks[seat]
            head.seats, head.claim = self._alive(head.seats), self._alive(head.claim)
            head.newest_call, head.replaced = self._alive(head.newest_call), self._alive(head.replaced)
            made.head = head
        changed = ((identity, now) for identity, now in self._waiters.items() if now != self._read[identity])
        made.waiters = {identity: now if now != _NO_WAITER else None for identity, now in changed}
        return made

    def _alive(self, timed: Timed[T] | None) -> Timed[T] | None:
        return timed if timed is not None and (timed.until is None or timed.until > self.now) else None

    def _until(self, life_ms: int) -> int:
        return self.now + life_ms * 1000

    def _left_ms(self, timed: Timed[Any] | Mark | None) -> int:
        return -1 if timed is None or timed.until is None else -((self.now - timed.until) // 1000)

    # -- the lock

    def _lock(self) -> Timed[LockRecord] | None:
        found = self._alive(self._head.locks.get(self.seat_number))
        guard = self._head.guards.get(self.seat_number)
        if found is not None or guard is None:
            return found
        if self._session.end_guard(guard):
            del self._head.guards[self.seat_number]
            return None
        held = Timed(LockRecord(GUARDED, "", guard, self.now, ttl_ms=GUARDED_MS), self._until(GUARDED_MS))
        self._head.locks[self.seat_number] = held
        return held

    def lock(self) -> LockRecord | None:
        """Return the lock; None if it is free."""
        found = self._lock()
        return copy(found.record) if found else None

    def put_lock(self, lock: LockRecord) -> None:
        """Write the lock. A lock that exists keeps its expiry; a new one does not expire."""
        found = self._lock()
        self._head.locks[self.seat_number] = Timed(copy(lock), found.until if found else None)

    def drop_lock(self) -> None:
        """Remove the lock. While a transaction that its holder guards is open, the seat is not free (:meth:`lock`)."""
        self._head.locks.pop(self.seat_number, None)

    def lock_left_ms(self) -> int:
        """Return the milliseconds until the lock expires; -1 if it does not expire."""
        return self._left_ms(self._lock())

    def expire_lock(self, life_ms: int | None) -> None:
        lock = self._head.locks[self.seat_number].record
        self._head.locks[self.seat_number] = Timed(lock, None if life_ms is None else self._until(life_ms))

    def seat(self, number: int) -> Records:
        """Return these records with the lock of another seat."""
        other = copy(self)
        other.seat_number = number
        return other

    def guard(self, token: int) -> None:
        """Record that the holder of this seat guards a transaction. Its token is the guard's."""
        self._head.guards[self.seat_number] = self._changes.guard = token

    def taken_seats(self) -> list[int]:
        """Return the seats that have a lock."""
        return sorted(seat for seat, lock in self._head.locks.items() if self._alive(lock))

    def seats(self) -> SeatsRecord | None:
        found = self._alive(self._head.seats)
        return found.record if found else None

    def put_seats(self, seats: SeatsRecord, life_ms: int) -> None:
        self._head.seats = Timed(seats, self._until(life_ms))

    def next_token(self) -> int:
        """Issue a fencing token, for the call that takes the lock of this seat."""
        if (guard := self._head.guards.pop(self.seat_number, None)) is not None:
            # A retry takes the lock that is reserved for it (``keep_on_retry``), so :meth:`lock` did not ask.
            self._changes.ended_guards.append(guard)
        self._changes.token = self._session.next_token
        return self._changes.token

    def wake_waiting_call(self) -> None:
        """Wake the call that has waited for the lock for the longest time, in its thread or pool slot."""
        self._changes.wakes += 1

    # -- marks; the key is an identity, an acquisition, a tick, or a worker

    def _mark(self, kind: MarkKind, key: str) -> Mark | None:
        changed = self._changes.marks
        found = changed[kind, key] if (kind, key) in changed else self._session.mark(kind, key)
        return found if found is not None and found.until > self.now else None

    def mark(self, kind: MarkKind, key: str) -> str | None:
        found = self._mark(kind, key)
        return found.text if found else None

    def mark_left_ms(self, kind: MarkKind, key: str) -> int:
        return self._left_ms(self._mark(kind, key))

    def marks(self, kind: MarkKind) -> dict[str, str]:
        """Return the texts of all marks of a kind, by key, as they were before this transaction."""
        return {key: mark.text for key, mark in self._session.marks(kind).items() if mark.until > self.now}

    def put_mark(self, kind: MarkKind, key: str, text: str, life_ms: int) -> None:
        self._changes.marks[kind, key] = Mark(text, self._until(life_ms))

    def drop_mark(self, kind: MarkKind, key: str) -> None:
        if self._mark(kind, key):
            self._changes.marks[kind, key] = None

    # -- the claim

    def claim(self) -> Claim | None:
        found = self._alive(self._head.claim)
        return copy(found.record) if found else None

    def claim_left_ms(self) -> int:
        return self._left_ms(self._alive(self._head.claim))

    def put_claim(self, claim: Claim) -> None:
        """Write the claim. A claim that exists keeps its expiry."""
        found = self._alive(self._head.claim)
        self._head.claim = Timed(copy(claim), found.until if found else None)

    def expire_claim(self, life_ms: int) -> None:
        if self._head.claim is not None:
            self._head.claim = Timed(self._head.claim.record, self._until(life_ms))

    def drop_claim(self) -> None:
        self._head.claim = None

    # -- waiters: a parked message has an entry; it is in one part of the queue, or it is granted and in none

    def _waiter(self, identity: str) -> Waiter:
        if identity not in self._waiters:
            self._note(identity, self._session.waiter(identity) or _NO_WAITER)
        return self._waiters[identity]

    def _note(self, identity: str, waiter: Waiter) -> None:
        if identity not in self._waiters:
            self._waiters[identity] = self._read[identity] = waiter

    def _change(self, identity: str, **facts: Any) -> None:
        before, head = self._waiter(identity), self._head
        now = self._waiters[identity] = replace(before, **facts)
        head.parked += (now.entry is not None) - (before.entry is not None)
        head.waiting += (now.waiting is not None) - (before.waiting is not None)
        head.delayed += (now.delayed is not None) - (before.delayed is not None)
        head.dead += (now.dead is not None) - (before.dead is not None)

    def has_entries(self) -> bool:
        """Return whether a message is parked: it waits, or it is granted."""
        return self._head.parked > 0

    def entry(self, identity: str) -> str | None:
        return self._waiter(identity).entry

    def entries(self) -> list[tuple[str, str]]:
        """Return the identities and texts of all stored messages."""
        found: dict[str, str | None] = {**self._session.entries()}
        found |= {identity: waiter.entry for identity, waiter in self._waiters.items()}
        return [(identity, entry) for identity, entry in found.items() if entry is not None]

    def put_entry(self, identity: str, entry: str) -> None:
        self._change(identity, entry=entry)

    def drop_waiter(self, identity: str) -> None:
        """Remove the message from its part, with its entry and all facts about it. A dead letter stays."""
        waiter = self._waiter(identity)
        self._change(identity, **vars(replace(_NO_WAITER, dead=waiter.dead, shown=waiter.shown)))

    def score(self, part: QueuePart, identity: str) -> int | None:
        return _score(self._waiter(identity), part)

    def put_in(self, part: QueuePart, identity: str, score: int) -> None:
        self._change(identity, **{part: score})

    def take_from(self, part: QueuePart, identity: str) -> None:
        self._change(identity, **{part: None})

    def first_in(
        self, part: QueuePart, most: int, until: int | None = None, since: int | None = None
    ) -> list[tuple[str, int]]:
        """Return identities and scores, by score and then by identity.

        Args:
            part: The part of the queue.
            most: The highest number of waiters to return.
            until: Only scores up to this one; None: all.
            since: Only scores from this one; None: all.
        """
        if not self.count_in(part):
            return []
        # The session does not know which waiters have left the part. So many more replace them.
        changed = sum(now is not self._read[identity] for identity, now in self._waiters.items())
        for identity, waiter in self._session.first_in(part, most + changed, since, until):
            self._note(identity, waiter)
        scores = ((_score(waiter, part), identity) for identity, waiter in self._waiters.items())
        found = sorted(
            (score, identity)
            for score, identity in scores
            if score is not None and (until is None or score <= until) and (since is None or score >= since)
        )
        return [(identity, score) for score, identity in found[:most]]

    def count_in(self, part: QueuePart) -> int:
        return self._head.waiting if part == "waiting" else self._head.delayed

    def position_in(self, part: QueuePart, identity: str) -> int | None:
        """Return the position in a part, from 0."""
        score = self.score(part, identity)
        if score is None:
            return None
        position = self._session.count_before(part, score, identity)
        for other, now in self._waiters.items():
            for waiter, sign in ((now, 1), (self._read[other], -1)):
                its_score = _score(waiter, part)
                position += sign if its_score is not None and (its_score, other) < (score, identity) else 0
        return position

    def lost_grants(self, identity: str) -> tuple[int | None, int]:
        """Return the rank of a waiter that lost a grant, and the number of grants that it lost."""
        waiter = self._waiter(identity)
        return waiter.lost_rank, waiter.lost

    def put_lost_grants(self, identity: str, rank: int | None, tries: int) -> None:
        self._change(identity, lost_rank=rank, lost=0 if rank is None else tries)

    def evicted_by(self, identity: str) -> str:
        """Return the identity of the waiter that this one evicted; "" for none."""
        return self._waiter(identity).evicted

    def put_evicted_by(self, identity: str, evicted: str) -> None:
        self._change(identity, evicted=evicted)

    def replaced_by(self, identity: str) -> str | None:
        """Return the task id of the debounced call that replaced this waiter; None if none did."""
        return self._waiter(identity).replaced_by

    def put_replaced_by(self, identity: str, by: str) -> None:
        self._change(identity, replaced_by=by)

    def newest_call(self) -> NewestCall | None:
        found = self._alive(self._head.newest_call)
        return copy(found.record) if found else None

    def put_newest_call(self, newest: NewestCall, life_ms: int) -> None:
        self._head.newest_call = Timed(copy(newest), self._until(life_ms))

    def replaced(self) -> ReplacedCalls | None:
        found = self._alive(self._head.replaced)
        return deepcopy(found.record) if found else None

    def put_replaced(self, calls: ReplacedCalls, life_ms: int | None) -> None:
        """Write the record. With a life of None, it keeps its expiry."""
        found = self._alive(self._head.replaced)
        until = self._until(life_ms) if life_ms is not None else found.until if found else None
        self._head.replaced = Timed(deepcopy(calls), until) if calls != ReplacedCalls() else None

    def next_sweep(self) -> int | None:
        """Return the time (us) from which a sweep visits this name; None: no sweep does."""
        return self._head.sweeps.get(self._swept)

    def sweep_at(self, when: int | None, *, earlier: bool = False) -> None:
        """Set the time (us) from which a sweep visits this name; None: no sweep. ``earlier``: never move it back."""
        planned = self.next_sweep()
        if when is None:
            self._head.sweeps.pop(self._swept, None)
        else:
            self._head.sweeps[self._swept] = min(when, planned) if earlier and planned is not None else when

    def sweeps(self) -> list[int]:
        """Return the ``LockName.seats`` of the names that a sweep visits."""
        return sorted(self._head.sweeps)

    # -- dead letters, and removed waiters until their result is stored

    def has_dead(self) -> bool:
        return self._head.dead > 0

    def dead(self, identity: str) -> str | None:
        return self._waiter(identity).dead

    def put_dead(self, identity: str, entry: str) -> None:
        self._change(identity, dead=entry)

    def drop_dead(self, identity: str) -> None:
        self._change(identity, dead=None)

    def dead_since(self, identity: str) -> int | None:
        """Return the time since which operators see this dead letter; None if they do not."""
        return dict(self._waiter(identity).shown).get(self._swept)

    def shown_dead(self, identity: str) -> list[int]:
        """Return the times since which operators see this dead letter, under the name with and without seats."""
        return [since for _, since in self._waiter(identity).shown]

    def show_dead(self, identity: str, since: int | None) -> None:
        """Show a dead letter to operators, or stop (None)."""
        shown = {seats: time for seats, time in self._waiter(identity).shown if seats != self._swept}
        if since is not None:
            shown[self._swept] = since
        self._change(identity, shown=tuple(sorted(shown.items())))

    def hide_dead(self, identity: str) -> None:
        """Stop to show a dead letter to operators, under the name with and without seats."""
        self._change(identity, shown=())


def _score(waiter: Waiter, part: QueuePart) -> int | None:
    return waiter.waiting if part == "waiting" else waiter.delayed
