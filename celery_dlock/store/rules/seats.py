"""Names with seats (``limit``): each verb finds the seat that it concerns, and applies the rules of a lock to it.

These are the rules of ``scripts/seats/``. ``common.lua`` explains the seats and their record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

from ..acquisition import granted_to, reserved_for
from ..base import QueueStepResult, ReleaseRequest
from ..holder_model import Holder
from ..model import Acquired, AcquireRequest, Grant, Parked, Refusal, Released, RenewalResult
from ..operator_model import Waiting
from . import acquire as plain_acquire
from . import queue as plain_queue
from . import release as plain_release
from . import runs as plain_runs
from .data import LockRecord, SeatsRecord
from .queue import grant_next, has_waiters, unpublished_grant
from .records import Records

__all__ = [
    "acquire",
    "confirm_publish",
    "decline_grant",
    "inspect",
    "list_waiters",
    "mark_done",
    "release",
    "remove_waiter",
    "renew",
    "sweep",
]

#: Seconds after which a limit counts no more, if no command has had it.
_LIMIT_S: Final = 60
_RECORD_MS: Final = 24 * 3600 * 1000
_MOST_SEATS: Final = 100
#: The granter of a grant that no reply names.
_SWEEP: Final = "sweep"
#: A time of the next sweep that stands for none, while a sweep visits the seats.
_UNSET: Final = 1


class _Seats:
    """The seats of a name, as they are when a command begins.

    Args:
        records: The records of the name.
        limit: ``LockName.seats`` of the command.
    """

    def __init__(self, records: Records, limit: int) -> None:
        self.records = records
        known, self.clock_s = records.seats() or SeatsRecord(), records.now // 1_000_000
        self.allowed, seen_s = known.limit, known.seen_s
        if limit >= self.allowed or (limit > 0 and self.clock_s - seen_s > _LIMIT_S):
            self.allowed, seen_s = limit, self.clock_s
        # If the clock went back, the stored time is later than now, and the larger limit would not run out.
        self.seen_s = min(seen_s, self.clock_s)
        self.seat_count = min(max(known.seat_count, self.allowed), _MOST_SEATS)
        #: The lock of each seat that is not free, by its number.
        self.taken: dict[int, LockRecord] = {}
        for number in range(self.seat_count):
            lock = records.seat(number).lock()
            if lock is not None:
                self.taken[number] = lock
        self.used_seats = max(self.taken, default=-1) + 1
        #: A verb enters the name in the index for its own seat. Another seat may be due sooner.
        self.planned = records.next_sweep()

    def where(self, matches: Callable[[LockRecord], bool]) -> int | None:
        """Return the first seat whose lock matches; None if there is none."""
        return next((number for number, lock in self.taken.items() if matches(lock)), None)

    def of_acquisition(self, acquisition: str) -> int | None:
        """Return the seat of an acquisition, else one whose unpublished grant an earlier copy of the command made."""
        number = self.where(lambda lock: lock.acquisition == acquisition)
        return self.granted_by(acquisition) if number is None else number

    def granted_by(self, granter: str) -> int | None:
        """Return the seat whose unpublished grant an earlier copy of this command made; None if there is none."""
        return self.where(lambda lock: lock.granter == granter and not lock.published)

    def granted_to(self, identity: str) -> int | None:
        return self.where(lambda lock: lock.acquisition == granted_to(identity))

    def keep(self) -> None:
        """Write the record of the seats."""
        record = SeatsRecord(self.allowed, self.seen_s, max(self.allowed, self.used_seats))
        self.records.put_seats(record, _RECORD_MS)

    def keep_planned(self) -> None:
        """Keep the time of the sweep that another seat needs."""
        if self.planned is not None:
            self.records.sweep_at(self.planned, earlier=True)

    def use(self, number: int) -> None:
        self.used_seats = max(self.used_seats, number + 1)

    # -- the seat of an acquire

    def related(self, acquisition: str, identity: str) -> int | None:
        """Return the seat of this acquisition, else one that this message runs on or is to get; None if there is none.

        Seats above the limit count too.
        """
        number = self.where(lambda lock: lock.acquisition == acquisition)
        if number is not None or not identity:
            return number
        its_own = granted_to(identity), reserved_for(identity)
        for matches in (
            lambda lock: lock.identity == identity and lock.due is None,
            lambda lock: lock.acquisition in its_own,
            lambda lock: lock.reserved_for == identity,
        ):
            number = self.where(matches)
            if number is not None:
                return number
        return None

    def free(self) -> int | None:
        return next((number for number in range(self.allowed) if number not in self.taken), None)

    def busiest(self, *, notify: bool) -> int:
        """Return the seat that the refusal names: one whose holder's body has ended, else the first one to expire.

        If the call waits, all seats are marked, so that each release wakes a waiting call.
        """
        chosen, soonest_ms = 0, float("inf")
        for number, lock in self.taken.items():
            seat = self.records.seat(number)
            left_ms: float = seat.lock_left_ms()
            if lock.ttl_ms is not None and left_ms > lock.ttl_ms:
                # The store's clock went back.
                seat.expire_lock(lock.ttl_ms)
                left_ms = lock.ttl_ms
            if lock.due is not None:
                left_ms = max(0, lock.due / 1000 - self.clock_s * 1000)
            if notify:
                self.mark(number, notify=True)
            if number < self.allowed:
                left_ms = -1 if lock.releasing else left_ms
                if left_ms < soonest_ms:
                    chosen, soonest_ms = number, left_ms
        return chosen

    def mark(self, number: int, *, notify: bool = False, waiters: bool = False) -> None:
        """Leave word in the lock of a seat, for its release."""
        seat = self.records.seat(number)
        lock = seat.lock()
        if lock is not None:
            lock.notify, lock.has_waiters = lock.notify or notify, lock.has_waiters or waiters
            seat.put_lock(lock)

    def wake_others(self, number: int) -> None:
        """Wake the next waiting call if another seat is free, and mark the taken seats again.

        The call that took this seat has waited. One wake-up may stand for several releases.
        """
        one_is_free = False
        for other in range(self.allowed):
            if other in self.taken:
                self.mark(other, notify=True)
            elif other != number:
                one_is_free = True
        if one_is_free:
            self.records.wake_waiting_call()

    # -- the queue that all seats share

    def grant_free_seats(self) -> None:
        """Grant the free seats to waiters: the limit has grown, or a lease has expired."""
        for number in range(self.allowed):
            if number in self.taken:
                continue
            seat = self.records.seat(number)
            # Another granter: a second copy of this command must find only the grant that the acquire makes.
            granted, grant = grant_next(seat, _SWEEP), seat.lock()
            if granted is None or grant is None:
                return
            # No reply names this grant, so it is due at once, and a sweep publishes the waiter's message.
            grant.due = self.planned = self.records.now
            seat.put_lock(grant)
            self.taken[number] = grant
            self.use(number)

    def take_back_grant(self, number: int) -> bool:
        """If a seat above the limit is granted, take the grant back: its waiter waits at its rank again."""
        seat = self.records.seat(number)
        grant = seat.lock()
        if number < self.allowed or grant is None or grant.due is None:
            return False
        self.records.put_in("waiting", grant.identity, grant.rank)
        seat.drop_lock()
        self.records.sweep_at(self.records.now)
        return True

    def grants(self) -> list[LockRecord]:
        return [lock for lock in self.taken.values() if lock.due is not None]


def acquire(records: Records, limit: int, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Refusal:
    """Take the first free seat, park the message that has to wait, or return why all seats are taken."""
    seats, identity = _Seats(records, limit), request.identity.digest if request.identity else ""
    number = seats.related(acquisition, identity)
    if number is None and request.queue is not None:
        # A second copy of this command finds the grant that the first one made.
        number = seats.of_acquisition(acquisition)
    if number is None:
        number = seats.free()
    if number is None:
        number = seats.busiest(notify=request.notify)
    granted = None if request.queue is None else seats.granted_by(acquisition)
    answer = plain_acquire.acquire(records.seat(number), acquisition, ttl_ms, request)
    if request.queue is None:
        seats.use(number)
    else:
        if granted is not None and isinstance(answer, Parked) and answer.granted is None:
            # The first copy of this command may have granted one seat to another waiter, and one to this message.
            answer = answer._replace(granted=unpublished_grant(records.seat(granted), acquisition))
        _share_queue(seats, number)
    seats.keep()
    if not isinstance(answer, Acquired):
        return answer
    if request.notify and request.waited:
        seats.wake_others(number)
    return answer._replace(seat=number)


def _share_queue(seats: _Seats, number: int) -> None:
    """Do what a call of the queue policy leaves to do for the other seats."""
    lock = seats.records.seat(number).lock()
    if lock is not None:
        seats.taken.setdefault(number, lock)
        seats.use(number)
    if has_waiters(seats.records):
        for other in seats.taken:
            # A release under another policy reads this field.
            seats.mark(other, waiters=True)
        seats.grant_free_seats()
    seats.keep_planned()


def renew(
    records: Records, limit: int, acquisition: str, ttl_ms: int, facts: Sequence[tuple[str, str]]
) -> RenewalResult:
    """Renew the lease of a seat. This keeps the record of the seats, too."""
    seats = _Seats(records, limit)
    number = seats.where(lambda lock: lock.acquisition == acquisition) or 0
    renewed = plain_release.renew(records.seat(number), acquisition, ttl_ms, facts)
    if renewed is True:
        seats.keep()
    return renewed


def inspect(records: Records, limit: int) -> Holder | None:
    """Return the holder of the first seat that is held."""
    return plain_release.inspect(records.seat(next(iter(_Seats(records, limit).taken), 0)))


def release(records: Records, limit: int, acquisition: str, ending: ReleaseRequest) -> Released:
    """Free the seat of an acquisition. Under the queue policy, grant it to the next waiter."""
    seats = _Seats(records, limit)
    number = seats.of_acquisition(acquisition)
    if not ending.queue:
        return plain_release.release(
            records.seat(number or 0), acquisition, ending, lambda _seat, *options: sweep(records, limit, *options)
        )
    if number is None and ending.identity:
        number = seats.granted_to(ending.identity)
    number = number or 0
    lock = seats.taken.get(number)
    if lock is not None and lock.acquisition == acquisition and has_waiters(records):
        seats.mark(number, waiters=True)
    released = plain_release.release(records.seat(number), acquisition, ending)
    if seats.take_back_grant(number):
        released = released._replace(granted=None)
    seats.keep_planned()
    return released


def mark_done(records: Records, limit: int, identity: str, owner: str, age_us: int) -> None:
    """Set the done mark of a message, unless a later message with its id holds a seat."""
    number = _Seats(records, limit).where(lambda lock: lock.identity == identity)
    plain_runs.mark_done(records.seat(number or 0), identity, owner, age_us)


def confirm_publish(records: Records, limit: int, identity: str, grant_timeout_ms: int) -> bool:
    """Record that the message of a granted waiter was published."""
    seats = _Seats(records, limit)
    stands = plain_queue.confirm_publish(records.seat(seats.granted_to(identity) or 0), identity, grant_timeout_ms)
    seats.keep_planned()
    return stands


def decline_grant(records: Records, limit: int, grant: Grant, *, foreign: bool, present: bool) -> bool:
    """Leave a granted message to another worker."""
    seats = _Seats(records, limit)
    seat = records.seat(seats.granted_to(grant.identity) or 0)
    stands = plain_queue.decline_grant(seat, grant, foreign=foreign, present=present)
    seats.keep_planned()
    return stands


def remove_waiter(
    records: Records, limit: int, identity: str, granter: str, *, dead_letter: bool, ended: bool
) -> QueueStepResult:
    """Remove a waiter. If it had a grant, grant its seat to the next one."""
    seats = _Seats(records, limit)
    number = None
    for matches in (
        lambda lock: lock.identity == identity and lock.due is None,
        lambda lock: lock.identity == identity,
        lambda lock: lock.granter == granter and not lock.published,
    ):
        number = seats.where(matches) if number is None else number
    seat = records.seat(number or 0)
    removed = plain_queue.remove_waiter(seat, identity, granter, dead_letter=dead_letter, ended=ended)
    if seats.take_back_grant(number or 0):
        removed = removed._replace(granted=None)
    seats.keep_planned()
    return removed


def sweep(
    records: Records, limit: int, granter: str, grant_timeout_ms: int, max_tries: int, foreign_ms: int, pause_ms: int
) -> QueueStepResult:
    """Visit every seat of a name with waiters, up to the first one with something to do."""
    seats, swept, next_due = _Seats(records, limit), QueueStepResult(), None
    _restore_places(seats)
    # Another seat may have become free since the first copy of this command. It must not hide that copy's grant.
    first_seat = seats.granted_by(granter) or 0
    for offset in range(seats.seat_count):
        number = (first_seat + offset) % seats.seat_count
        seat, lock = records.seat(number), seats.taken.get(number)
        seat.sweep_at(_UNSET)
        swept = QueueStepResult()
        if number < seats.allowed:
            swept = plain_queue.sweep(seat, granter, grant_timeout_ms, max_tries, foreign_ms, pause_ms)
        elif lock is not None and lock.due is not None and lock.due <= records.now:
            seats.take_back_grant(number)
        due = records.next_sweep()
        if due is not None and due != _UNSET and (next_due is None or due < next_due):
            next_due = due
        if swept.granted is not None or swept.dead_letter or swept.lost_grant:
            # The result can name one grant only. The next sweep goes on with the other seats.
            next_due = records.now
            break
    if next_due is not None or not records.has_entries():
        records.sweep_at(next_due)
    seats.keep()
    return swept


def _restore_places(seats: _Seats) -> None:
    """Give a place to a message whose grant is on a seat that the record, which has expired, no longer counts."""
    records, granted = seats.records, {lock.identity for lock in seats.taken.values() if lock.due is not None}
    for identity, entry in records.entries():
        waits = records.score("waiting", identity) is not None or records.score("delayed", identity) is not None
        if not waits and identity not in granted:
            rank = records.lost_grants(identity)[0]
            records.put_in("waiting", identity, _parked_rank(entry) or records.now if rank is None else rank)


def _parked_rank(entry: str) -> int | None:
    """Return the rank that a parked message had at its arrival; None if the message cannot be read."""
    try:
        facts = json.loads(entry.partition("\n")[2])
    except ValueError:
        return None
    rank = facts.get("rank") if isinstance(facts, dict) else None
    return rank if isinstance(rank, int) else None


def list_waiters(records: Records, limit: int, name: str, most: int) -> Waiting:
    """Return the number of waiters, and the first of them. The granted ones of all seats come first."""
    return plain_queue.list_waiters(records, name, most, _Seats(records, limit).grants())
