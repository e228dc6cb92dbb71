"""The memory store: the whole store contract in one process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from ...errors import StoreUnavailable
from ...keys.lock_name import ONE_LOCK, ONE_SEAT, LockName, name_from_member, one_seat
from ..base import FOREIGN_MS, QueueStepResult, ReleaseListener, ReleaseRequest
from ..claim_model import ClaimRequest, ExistingCall
from ..holder_model import Holder
from ..model import Acquired, AcquireRequest, Grant, Refusal, Released, Renewal, RenewalResult
from ..operator import Place
from ..operator_model import DeadLetter, LockView, Page, RunView, State, Waiting
from ..rules import claims, operator, queue, release, runs, seats
from ..rules.acquire import acquire
from ..rules.views import names_in
from ..server_model import StoreInfo
from .data import NameData
from .records import Memory

__all__ = ["MemoryStore"]

#: Seconds between two checks by a call that waits in its thread: the first pause and the longest one.
_LOOK: Final = 0.002, 0.02
#: Maximum number of audit records.
_AUDIT_RECORDS: Final = 1000


class MemoryStore:
    """A store in the memory of this process. It implements the contract of operators, too.

    Args:
        memory: The data.
    """

    clustered: Final = False

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    # -- locks

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Refusal:
        with self.memory.records(name) as records:
            if _has_seats(name):
                return seats.acquire(records, name.seats, acquisition, ttl_ms, request)
            return acquire(records, acquisition, ttl_ms, request)

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[RenewalResult]:
        del within
        answers: list[RenewalResult] = []
        for name, acquisition, ttl_ms, facts, stoppable in renewals:
            with self.memory.records(name) as records:
                if _has_seats(name):
                    answers.append(seats.renew(records, name.seats, acquisition, ttl_ms, facts))
                else:
                    answers.append(release.renew(records, acquisition, ttl_ms, facts, stoppable=stoppable))
        return answers

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        with self.memory.records(name) as records:
            if _has_seats(name):
                return seats.release(records, name.seats, acquisition, ending)
            return release.release(records, acquisition, ending)

    def shard(self, name: LockName) -> int:
        del name
        return 0

    def inspect(self, name: LockName) -> Holder | None:
        with self.memory.records(name) as records:
            if _has_seats(name):
                return seats.inspect(records, name.seats)
            return release.inspect(records)

    def release_listener(self, name: LockName) -> ReleaseListener:
        return _Listener(self.memory, name)

    def close(self) -> None:
        """Do nothing: the data stay."""

    # -- last runs

    def last_run(self, name: LockName, tick: str = "") -> RunView | None:
        with self.memory.records(name) as records:
            return runs.last_run(records, name.text, tick)

    def forget_run(self, name: LockName, tick: str = "", mark: str = "") -> bool:
        with self.memory.records(name) as records:
            return runs.forget_run(records, tick, uuid.uuid4().hex, mark)

    def resolve_run(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "", mark: str = "") -> bool:
        with self.memory.records(name) as records:
            return runs.resolve_run(records, tick, uuid.uuid4().hex, mark, sent=sent, window_ms=window_ms)

    # -- claims

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        answers = []
        for name, request in publications:
            with self.memory.records(name) as records:
                answers.append(claims.claim(records, request))
        return answers

    def release_claim(self, name: LockName, task_id: str, generation: int, attempt: str = "") -> bool:
        with self.memory.records(name) as records:
            return claims.release_claim(records, task_id, generation, attempt)

    def extend_claims(self, extended: Sequence[tuple[LockName, str, int]]) -> None:
        for name, task_id, life_ms in extended:
            with self.memory.records(name) as records:
                claims.extend_claim(records, task_id, life_ms)

    # -- queues

    def sweep(
        self,
        name: LockName,
        granter: str,
        grant_timeout_ms: int,
        tries: int,
        foreign_ms: int = FOREIGN_MS,
        pause_ms: int = 0,
    ) -> QueueStepResult:
        with self.memory.records(name) as records:
            if _has_seats(name):
                return seats.sweep(records, name.seats, granter, grant_timeout_ms, tries, foreign_ms, pause_ms)
            return queue.sweep(records, granter, grant_timeout_ms, tries, foreign_ms, pause_ms)

    def confirm_publish(self, name: LockName, identity: str, grant_timeout_ms: int) -> bool:
        with self.memory.records(name) as records:
            if _has_seats(name):
                return seats.confirm_publish(records, name.seats, identity, grant_timeout_ms)
            return queue.confirm_publish(records, identity, grant_timeout_ms)

    def decline_grant(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        with self.memory.records(name) as records:
            if _has_seats(name):
                return seats.decline_grant(records, name.seats, grant, foreign=foreign, present=present)
            return queue.decline_grant(records, grant, foreign=foreign, present=present)

    def remove_waiter(
        self, name: LockName, identity: str, granter: str, *, dead_letter: bool = False, ended: bool = False
    ) -> QueueStepResult:
        with self.memory.records(name) as records:
            if _has_seats(name):
                return seats.remove_waiter(records, name.seats, identity, granter, dead_letter=dead_letter, ended=ended)
            return queue.remove_waiter(records, identity, granter, dead_letter=dead_letter, ended=ended)

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        with self.memory.records(name) as records:
            if _has_seats(name):
                seats.mark_done(records, name.seats, identity, owner, age_us)
            else:
                runs.mark_done(records, identity, owner, age_us)

    def list_waiters(self, name: LockName, most: int) -> Waiting:
        with self.memory.records(name) as records:
            if _has_seats(name):
                return seats.list_waiters(records, name.seats, name.text, most)
            return queue.list_waiters(records, name.text, most)

    def list_due_queues(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        wanted, found = set(buckets), []
        with self.memory.step() as now:
            until = now + round(within * 1e6)
            for number in sorted(wanted & self.memory.buckets.keys()):
                due = sorted((when, member) for member, when in self.memory.buckets[number].sweeps.items())
                found += [name_from_member(member, number) for when, member in due if when <= until][:most]
        return found

    def dead_letters_at(self, name: LockName) -> str:
        return f"memory:// (dead letters of {name.text})"

    # -- workers

    def info(self) -> StoreInfo:
        # There is no server whose restart could lose data that this process still needs.
        return StoreInfo(durable=True, eviction="noeviction", replicas=0)

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        key = "duty", f"{duty} {broker}"
        with self.memory.step() as now:
            holder, until = self.memory.workers.get(key, ("", 0))
            if until > now and holder != worker:
                return max(1, min(life_ms, (until - now) // 1000))
            self.memory.workers[key] = worker, now + life_ms * 1000
            return 0

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        self._save(node, worker, text, life_ms)

    def worker_records(self, node: str) -> dict[str, str]:
        return self._saved(node)

    def announce_workers(self, broker: str, life_ms: int) -> None:
        self._save(f"broker {broker}", "workers", "running", life_ms)

    def has_workers(self, broker: str) -> bool:
        return bool(self._saved(f"broker {broker}"))

    def _save(self, node: str, worker: str, text: str, life_ms: int) -> None:
        with self.memory.step() as now:
            if text:
                _, until = self.memory.workers.get((node, worker), ("", 0))
                self.memory.workers[node, worker] = text, max(until, now + life_ms * 1000)
            else:
                self.memory.workers.pop((node, worker), None)

    def _saved(self, node: str) -> dict[str, str]:
        with self.memory.step() as now:
            return {
                worker: text
                for (of, worker), (text, until) in self.memory.workers.items()
                if of == node and until > now
            }

    # -- operators

    def scan(
        self,
        kinds: Iterable[State],
        cursor: str,
        limit: int,
        wanted: Callable[[str], bool],
        accepted: Callable[[LockView], bool],
    ) -> Page[LockView]:
        if cursor and not cursor.isdecimal():
            raise ValueError(f"invalid cursor {cursor[:40]!r}: expected the cursor of the page before")
        states, first = frozenset(kinds), int(cursor or 0)
        with self.memory.step() as now:
            found = [one for name, data in self.memory.names() for one in _in_use(name, data, now)]
        items: list[LockView] = []
        for place, (name, tick) in enumerate(found[first:], first + 1):
            view = self.describe(name, tick) if wanted(name.text) else None
            if view is not None and not states.isdisjoint(view.states) and accepted(view):
                items.append(view)
                if len(items) >= limit and place < len(found):
                    return Page(items, str(place), place, len(found))
        return Page(items, "", len(found), len(found))

    def describe(self, name: LockName, tick: str = "") -> LockView:
        with self.memory.records(name) as records:
            dead = bool(self.memory.data(name).dead)
            return operator.describe(records, name.text, tick, has_dead_letters=dead, of_seat=name.seats == ONE_SEAT)

    def unsettled_runs(self, after: Place | None = None) -> Iterator[RunView]:
        with self.memory.step():
            found = [(name, tick) for name, data in self.memory.names() for tick in data.runs]
        for name, tick in _behind(after, found):
            with self.memory.records(name) as records:
                run = runs.last_run(records, name.text, tick)
            if run is not None and run.state != "used":
                yield run

    def dead_letters(self, after: Place | None = None) -> Iterator[DeadLetter]:
        with self.memory.step():
            found = {
                (name_from_member(member, number), identity): since
                for number, bucket in self.memory.buckets.items()
                for (identity, member), since in bucket.shown_dead.items()
            }
        for name, identity in _behind(after, found):
            with self.memory.records(name) as records:
                entry = records.dead(identity)
                if entry is None:
                    records.show_dead(identity, None)
            if entry is not None:
                yield DeadLetter(name.text, identity, *names_in(entry), found[name, identity] / 1e6)

    def queues(self, after: Place | None = None) -> Iterator[LockName]:
        with self.memory.step():
            found = [
                (name_from_member(member, number), "")
                for number, bucket in self.memory.buckets.items()
                for member in bucket.sweeps
            ]
        yield from (name for name, _ in _behind(after, found))

    def seats(self, name: LockName) -> int:
        if name.seats == ONE_SEAT:
            return 1
        with self.memory.records(name) as records:
            record = records.seats()
        return record.limit if record is not None else 1

    def free(self, name: LockName, acquisition: str, *, force: bool) -> tuple[str, Grant | None]:
        with self.memory.records(name) as records:
            return operator.free_lock(records, acquisition, force=force)

    def hold(self, name: LockName, operator_: str, hold_ms: int, reason: str) -> bool:
        with self.memory.records(name) as records:
            return operator.hold_lock(records, operator_, hold_ms, reason)

    def cancel_hold(self, name: LockName, acquisition: str, hold: str) -> bool:
        with self.memory.records(name) as records:
            return operator.cancel_hold(records, acquisition, hold)

    def requeue(self, name: LockName, identity: str) -> bool:
        with self.memory.records(name) as records:
            return queue.requeue(records, identity)

    def save_audit(self, at: float, record: str) -> None:
        with self.memory.step():
            kept = {*self.memory.audit, (at, record)}
            self.memory.audit = sorted(kept)[-_AUDIT_RECORDS:]

    def audit(self, limit: int) -> list[str]:
        with self.memory.step():
            return [record for _, record in self.memory.audit[-limit:]]

    def now(self) -> float:
        with self.memory.step() as now:
            return now / 1e6

    def clock_offsets(self) -> dict[str, float]:
        return {"memory://": self.memory.clock.ahead}


def _behind(after: Place | None, found: Iterable[tuple[LockName, str]]) -> list[tuple[LockName, str]]:
    """Return the entries behind a place, in their order."""
    behind = (one for one in found if after is None or Place.of(*one) > after)
    return sorted(behind, key=lambda one: Place.of(*one))


def _in_use(name: LockName, data: NameData, now: int) -> Iterator[tuple[LockName, str]]:
    """Yield the name, each of its seats above 0 that is held, and each of its ticks that has a run mark."""
    ticks = [tick for tick, (_, until) in data.runs.items() if until > now]
    if 0 in data.locks or data.claim is not None or "" in ticks:
        yield name, ""
    yield from ((one_seat(name, seat), "") for seat in sorted(data.locks) if seat)
    yield from ((name, tick) for tick in ticks if tick)


def _has_seats(name: LockName) -> bool:
    """Return whether a command for this name concerns its seats (``limit``). The name of one seat is one lock."""
    return name.seats not in (ONE_LOCK, ONE_SEAT)


class _Listener:
    """A call that waits for releases of one lock, in its thread or greenlet."""

    def __init__(self, memory: Memory, name: LockName) -> None:
        self._memory = memory
        self._name = name

    def wait(self, timeout: float) -> bool:
        with self._memory.records(self._name) as records:
            ticket = records.begin_to_wait()
        if ticket is None:
            return True
        end, pause = time.monotonic() + timeout, _LOOK[0]
        try:
            # Python's sleep, which gevent patches: a native condition would block all greenlets of the thread.
            while not ticket.woken and (left := end - time.monotonic()) > 0:
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LOOK[1])
        finally:
            if not ticket.woken:
                self._memory.data(self._name).leave(ticket)
        return ticket.woken

    def pass_on(self) -> None:
        with suppress(StoreUnavailable), self._memory.records(self._name) as records:
            records.wake_waiting_call()
