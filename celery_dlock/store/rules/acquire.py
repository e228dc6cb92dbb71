"""Acquire: take a lock, park the message that has to wait, or return why not."""

from __future__ import annotations

from dataclasses import dataclass

from ..acquisition import granted_to, reserved_for
from ..model import (
    Acquired,
    AcquireRequest,
    Duplicate,
    Grant,
    Held,
    Parked,
    Queued,
    QueueRequest,
    Refusal,
    Tombstoned,
    Unknown,
    Used,
)
from . import debounce, replace
from .data import LockRecord, RunMark
from .queue import (
    MOST_DUPLICATES,
    count_waiters,
    end_grant,
    first_waiters,
    grant_next,
    is_duplicate,
    place_before_all,
    unpublished_grant,
)
from .records import Records
from .views import holder_of, left_of_lock, run_holder

__all__ = ["acquire"]

#: The time of publication moves a call by this at most, however wrong the publisher's clock is.
_SENT_MARGIN_US = 10_000_000


def acquire(records: Records, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Refusal:
    """Take the lock, or return why it was refused. The answers and their order are those of the store contract."""
    return _Call(records, acquisition, ttl_ms, request).answer()


@dataclass
class _Findings:
    """Facts that the lock keeps if this call takes it."""

    outcome_unknown: bool = False
    duplicate_possible: bool = False
    inherited_notify: bool = False
    has_waiters: bool = False


class _Call:
    """One acquire. ``queue`` is None unless the policy is "queue" or "replace": only these read and write the queue."""

    def __init__(self, records: Records, acquisition: str, ttl_ms: int, request: AcquireRequest) -> None:
        self.records, self.acquisition, self.ttl_ms, self.request = records, acquisition, ttl_ms, request
        self.identity = request.identity.digest if request.identity else ""
        self.queue = request.queue
        self.once = request.once and self.identity != ""
        self.lock = records.lock()
        self.finished_at = records.mark("done", self.identity) if self.identity else None
        self.mark = RunMark.of(records.mark("run", request.tick)) if self.once else RunMark()
        self.rank = records.now - request.age_us if request.rank_us is None else request.rank_us
        if self.queue is not None and self.rank <= self.queue.after_us:
            # Keep the order in which the worker received its messages.
            self.rank = self.queue.after_us + 1
        #: The place among the waiters. The time of publication moves it.
        self.place = self.rank
        if self.queue is not None and self.queue.sent_us:
            earliest, latest = self.rank - _SENT_MARGIN_US, self.rank + _SENT_MARGIN_US
            self.place = max(0, earliest, min(latest, self.queue.sent_us))
        holder = self.lock.acquisition if self.lock else ""
        #: keep_on_retry: an earlier run has reserved the lock for its retry, and this message is that retry.
        self.reserved = self.identity != "" and holder == reserved_for(self.identity)
        self.granted = self.queue is not None and holder == granted_to(self.identity)

    def answer(self) -> Acquired | Refusal:
        ended = self._ended()
        if ended is not None:
            return ended
        request = self.request
        # `unknown` matters only if the lock is free: while the body of the started run is alive, it holds the lock.
        unknown = self.mark.state == "unknown" or (
            self.mark.state == "started" and self.mark.acquisition != self.acquisition
        )
        found = _Findings(unknown, request.redelivered or request.republished)
        refused = unknown and request.hold_if_unknown
        waits = self._hold_up() if self.queue is None else self._wait(self.queue, found, refused=refused)
        if waits is not None:
            return waits
        if refused:
            return Unknown(run_holder(self.mark), self._end_waiting())
        if self.finished_at is not None:
            # A message with this task id has finished, and this is a new message. The old done mark would refuse copies
            # of the new message.
            self.records.drop_mark("done", self.identity)
            found.duplicate_possible = True
        self._leave_queue(found)
        if self.queue is not None and self.queue.debounce:
            debounce.record_start(self.records, self.queue, self.rank)
        elif self.queue is not None and self.queue.replace:
            by = request.requester.task_id
            replace.record_start(self.records, self.queue, self.rank, by, granted=self.granted)
        return self._take(found)

    def _ended(self) -> Acquired | Refusal | None:
        """Return the answer that an earlier command decided; None if there is none."""
        records, lock = self.records, self.lock
        if lock is not None and lock.acquisition == self.acquisition:
            return self._repeated(lock)
        if records.mark("tombstone", self.acquisition) is not None:
            return Tombstoned()
        finished_at = self.finished_at
        request = self.request
        if finished_at is not None and (request.redelivered or self.rank - request.doubt_us <= int(finished_at)):
            return Duplicate(self._end_waiting())
        if self.mark.is_used:
            by = run_holder(self.mark)
            stored = self.mark.state == "used"
            return Used(by, by.identity == self.identity, self._end_waiting(), result_stored=stored)
        return None

    # -- refusals

    def _repeated(self, lock: LockRecord) -> Acquired:
        """Return the reply of the first copy of this command. This one may have a longer ttl: extend the lease."""
        if self.records.lock_left_ms() < self.ttl_ms:
            self.records.expire_lock(self.ttl_ms)
        seed = (self.mark.seed or str(lock.token)) if self.once else ""
        return Acquired(lock.token, lock.since / 1e6, lock.since, seed, self.once and self.mark.crashed_at != "")

    def _end_waiting(self) -> Grant | None:
        """Remove this message from the queue. If the lock is granted to it or reserved for it, grant the next one."""
        if self.queue is None:
            # A lock with waiters is not deleted: a sweep grants it when the reservation expires.
            if self.reserved and self.lock is not None and not self.lock.has_waiters:
                self.records.drop_lock()
            return None
        self.records.drop_waiter(self.identity)
        if not (self.reserved or self.granted):
            return unpublished_grant(self.records, self.acquisition)
        return end_grant(self.records, self.acquisition)

    def _hold_up(self) -> Refusal | None:
        """Return why a call that never queues must not take the lock; None if it may."""
        if self.lock is not None and not self.reserved:
            return self._held(self.lock)
        return None

    def _held(self, lock: LockRecord) -> Held:
        self._repair_expiry(lock)
        self._note_on(lock)
        same = self.identity != "" and lock.identity == self.identity
        return Held(holder_of(lock, left_of_lock(self.records, lock)), same, self.rank)

    def _repair_expiry(self, lock: LockRecord) -> None:
        """If the lock lives longer than every requested ttl, the store's clock went back: shorten its life."""
        if lock.ttl_ms is not None and self.records.lock_left_ms() > lock.ttl_ms:
            self.records.expire_lock(lock.ttl_ms)

    def _note_on(self, lock: LockRecord) -> None:
        """Set in the lock what its release has to know: a duplicate of its message exists, or a caller waits."""
        if self.identity and lock.identity == self.identity:
            lock.dup = True
        if self.request.notify:
            lock.notify = True
        self.records.put_lock(lock)

    # -- the queue

    def _wait(self, queue: QueueRequest, found: _Findings, *, refused: bool) -> Refusal | None:
        """Return why a call under "queue" or "replace" must not take the lock; None if it may."""
        records, lock = self.records, self.lock
        queued = records.entry(self.identity) is not None
        if queued:
            self._keep_place()
        answer = self._answer_to_copy(queue, queued=queued, refused=refused)
        if answer is not None:
            return answer
        found.duplicate_possible = found.duplicate_possible or self.granted
        held, preceded = (None if self.reserved or self.granted else lock), False
        if lock is None:
            # The lock is free. If this message is already queued, it was delivered twice: only the copy published for
            # its grant may take the lock. A message that is not queued takes it if all waiters have later ranks.
            first = records.first_in("waiting", 1)
            found.has_waiters = first != []
            preceded = queued or (first != [] and first[0][1] < self.place)
        elif held is not None:
            self._repair_expiry(held)
            if held.kind != "grant" and self.identity in (held.identity, held.reserved_for):
                return self._meet_own(queue, held)
        if queue.debounce:
            evicted = self._evicted_before()
            call = debounce.DebouncedCall(records, self.acquisition, self.request, queue, self.rank, queued, evicted)
            return call.wait(held, granted=self.granted)
        if queue.replace:
            return self._replace(queue, held, queued=queued, preceded=preceded)
        return self._park(queue, held, queued=queued) if preceded or held is not None else None

    def _replace(self, queue: QueueRequest, held: LockRecord | None, *, queued: bool, preceded: bool) -> Refusal | None:
        evicted = self._evicted_before()
        call = replace.ReplacingCall(self.records, self.acquisition, self.request, queue, self.rank, queued, evicted)
        self.rank = call.rank
        if self.granted:
            return call.take()
        if queued:
            return call.answer_queued()
        if not call.waits(blocked=preceded or held is not None):
            return None
        return call.park(held) if queue.entry else self._park(queue, held, queued=queued)

    def _answer_to_copy(self, queue: QueueRequest, *, queued: bool, refused: bool) -> Refusal | None:
        """Return the answer to a command that was sent twice, or to a copy not published for its grant; or None."""
        lock = self.lock
        if lock is None:
            return None
        if refused and not queued:
            granted = unpublished_grant(self.records, self.acquisition)
            if granted is not None:
                # This command was sent twice: the first copy was refused, and passed the message's grant on.
                return Unknown(run_holder(self.mark), granted)
        if self.granted and str(lock.since) != queue.grant_id:
            granted = unpublished_grant(self.records, self.acquisition)
            newer = self.request.requester.task_id if queue.debounce or queue.replace else ""
            return Parked(self.rank, int(granted is not None), granted, self._evicted_before(), newer)
        return None

    def _meet_own(self, queue: QueueRequest, held: LockRecord) -> Held | Parked:
        """Answer a duplicate of the holder's message, or the holder's retry (``keep_on_retry``)."""
        if self.identity == held.reserved_for or not (queue.park_duplicate and queue.entry):
            return self._held(held)
        held.dup, self.place = True, place_before_all(self.rank)
        self._enqueue(queue, held)
        return Parked(self.rank, 0, None, None)

    def _keep_place(self) -> None:
        """A message that is queued keeps its place, whichever of its copies arrives."""
        place = self.records.score("waiting", self.identity)
        if place is None:
            place, _ = self.records.lost_grants(self.identity)
        if place is not None and place < self.place:
            if not is_duplicate(place):
                self.rank = min(self.rank, place + self.rank - self.place)
            self.place = place

    def _park(self, queue: QueueRequest, lock: LockRecord | None, *, queued: bool) -> Refusal:
        records = self.records
        waiters = count_waiters(records) - self._delayed_waiters()[0]
        full = not queued and queue.limit > 0 and waiters >= queue.limit
        if not queue.entry or (full and not queue.evict_oldest):
            if lock is not None:
                self._note_on(lock)
            return Queued(waiters, self.rank, None if lock is None else holder_of(lock, left_of_lock(records, lock)))
        evicted = self._evicted_before() if queued else None
        if full:
            evicted = self._evict_oldest()
            if evicted is None:
                # This message itself has the first place, so it is the one to evict.
                return Parked(self.rank, 0, None, Grant(self.identity, queue.entry))
        granted = self._enqueue(queue, lock)
        position = (records.position_in("waiting", self.identity) or 0) + 1
        return Parked(self.rank, position, granted, evicted)

    def _enqueue(self, queue: QueueRequest, lock: LockRecord | None) -> Grant | None:
        """Put the message into the queue at its place. Return the grant that this command made."""
        records = self.records
        records.put_entry(self.identity, queue.entry)
        records.take_from("delayed", self.identity)
        records.drop_dead(self.identity)
        # Forget the grants that the message has lost: this delivery shows that the broker still has the message.
        records.put_lost_grants(self.identity, None, 0)
        records.put_in("waiting", self.identity, self.place)
        if lock is not None:
            lock.has_waiters = True
            records.put_lock(lock)
            left_ms = lock.due and max(0, (lock.due - records.now) // 1000)
            left_ms = records.lock_left_ms() if left_ms is None else left_ms
            records.sweep_at(records.now + max(0, left_ms) * 1000, earlier=True)
            return unpublished_grant(records, self.acquisition)
        return grant_next(records, self.acquisition)

    def _delayed_waiters(self) -> tuple[int, str | None]:
        """Return how many delayed messages are duplicates of started ones, and the first other one."""
        delayed = [waiter for waiter, _ in self.records.first_in("delayed", MOST_DUPLICATES)]
        others = [waiter for waiter in delayed if not is_duplicate(self.records.lost_grants(waiter)[0])]
        return len(delayed) - len(others), others[0] if others else None

    def _evicted_before(self) -> Grant | None:
        """Return the waiter that this message evicted; None if there is none, or if its end is stored already."""
        records, evicted = self.records, self.records.evicted_by(self.identity)
        # Until its end is stored, a call that a newer one replaced stays a waiter. Other evicted ones are dead letters.
        waits = self.queue is not None and (self.queue.debounce is not None or self.queue.replace is not None)
        entry = records.entry(evicted) if waits else records.dead(evicted)
        return None if entry is None else Grant(evicted, entry)

    def _evict_oldest(self) -> Grant | None:
        """Evict the oldest waiter of a full queue. Return None if this message is the oldest."""
        records = self.records
        if waiting := first_waiters(records, 1):
            oldest, its_place = waiting[0]
        else:
            _, first_delayed = self._delayed_waiters()
            if first_delayed is None:
                return None
            oldest = first_delayed
            its_place = records.lost_grants(oldest)[0] or 0
        if its_place > self.place:
            return None
        entry = records.entry(oldest) or ""
        records.drop_waiter(oldest)
        # Keep the evicted message until its result is stored: the reply may be lost, or the caller may die.
        records.put_dead(oldest, entry)
        records.put_evicted_by(self.identity, oldest)
        return Grant(oldest, entry)

    # -- taking the lock

    def _leave_queue(self, found: _Findings) -> None:
        records, lock = self.records, self.lock
        if lock is not None:  # reserved for this message, or granted to it
            found.inherited_notify = lock.notify
            if self.queue is None:
                found.has_waiters = lock.has_waiters
            records.drop_lock()
        if self.queue is None:
            return
        first = found.has_waiters
        if found.duplicate_possible or self.reserved:
            records.drop_waiter(self.identity)
            records.drop_dead(self.identity)
        if found.duplicate_possible or self.reserved or first:
            found.has_waiters = records.has_entries()
            records.sweep_at(records.now + self.ttl_ms * 1000 if found.has_waiters else None)

    def _take(self, found: _Findings) -> Acquired:
        records, request, since = self.records, self.request, self.records.now
        token, by = records.next_token(), request.requester
        lock = LockRecord(
            self.acquisition, self.identity, token, since, by.task, by.task_id, by.node, by.pid, self.ttl_ms
        )
        lock.min_hold_ms, lock.dup = request.min_hold_ms or None, found.duplicate_possible
        lock.notify = found.inherited_notify or (request.notify and request.waited)
        lock.has_waiters = found.has_waiters
        lock.replaceable = self.queue is not None and self.queue.replace is not None
        records.put_lock(lock)
        records.expire_lock(self.ttl_ms)
        if not self.once:
            return Acquired(token, since / 1e6, self.rank)
        seed, crashed = self.mark.seed or str(token), (self.mark.crashed_at, self.mark.crashed_of, self.mark.crashed_by)
        if found.outcome_unknown:
            crashed = self.mark.at, self.mark.identity, self.mark.by
        started = RunMark("started", str(since), self.identity, self.acquisition, seed, by.text, *crashed)
        records.put_mark("run", request.tick, started.text, request.run_mark_ms)
        return Acquired(token, since / 1e6, self.rank, seed, crashed[0] != "")
