"""The engine: the whole store contract over a backend. Each method runs one rule in one transaction."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from ...errors import ReplyLost, ReplyTimeout, StoreBusy, StoreNotReady, StoreRefused, StoreUnavailable
from ...keys.lock_name import ONE_LOCK, ONE_SEAT, LockName, one_seat
from ...utils.rng import rng
from ..base import FOREIGN_MS, QueueStepResult, ReleaseListener, ReleaseRequest, call_again_if_reply_lost
from ..claim_model import ClaimExtension, ClaimRequest, ExistingCall
from ..holder_model import Holder
from ..model import Acquired, AcquireRequest, Grant, Refusal, Released, Renewal, RenewalResult
from ..operator import ListCursor
from ..operator_model import DeadLetter, LockView, Page, RunView, State, Waiting
from ..rules import claims, guard, operator, queue, release, runs, seats, shared
from ..rules.acquire import acquire
from ..rules.records import Records
from ..server_model import StoreInfo
from .backend import Backend, Conflict, Listed, Wanted

__all__ = ["EngineStore"]

T = TypeVar("T")

#: Seconds of the pause after a conflict: the longest first pause, and the longest one of all.
_PAUSE: Final = 0.002, 0.05
#: Entries of a list that are read at once.
_BATCH: Final = 100
_READ: Final = Wanted(write=False)
_WRITE: Final = Wanted()
#: The lists that a scan reads, one after the other.
_SCANNED: Final[tuple[Listed, ...]] = "name", "run"


class EngineStore:
    """A store over a backend. It implements the contract of operators, too.

    Args:
        backend: The data.
    """

    clustered: Final = False

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    # -- transactions

    def run(self, name: LockName, rule: Callable[[Records], T], wanted: Wanted = _WRITE) -> T:
        """Run a rule over the records of a lock name, and commit what it changed. Return its answer.

        If another transaction has changed the name, or if the reply is lost, the rule runs again on fresh data. So it
        must be safe to send twice, and must read nothing but the records.

        Args:
            name: The lock name.
            rule: The rule.
            wanted: Data that it will read.

        Raises:
            StoreBusy: Other transactions changed the name each time.
        """
        answer: T = call_again_if_reply_lost(self._run_once, name, rule, wanted)
        return answer

    def _run_once(self, name: LockName, rule: Callable[[Records], T], wanted: Wanted) -> T:
        within = self.backend.timeout if wanted.within is None else wanted.within
        end, pause, conflicts = time.monotonic() + within, _PAUSE[0], 0
        while True:
            try:
                return self._attempt(name, rule, wanted)
            except Conflict as conflict:
                conflicts += 1
                if time.monotonic() > end:
                    reason = str(conflict) or f"other transactions changed {name.text}"
                    raise StoreBusy(
                        f"the store {self.backend.shown} is too busy: within {within:g} s, {reason}, {conflicts} times "
                        "before this one could commit"
                    ) from conflict
            time.sleep(rng.uniform(0, pause))
            pause = min(2 * pause, _PAUSE[1])

    def _attempt(self, name: LockName, rule: Callable[[Records], T], wanted: Wanted) -> T:
        with self.backend.open(name, wanted) as session:
            records = Records(session, name)
            answer = rule(records)
            changes = records.changes()
            if changes.ended_guards:
                if not all(map(session.end_guard, changes.ended_guards)):
                    raise Conflict(f"a transaction that the earlier holder of {name.text} guards was still open")
                # That transaction may have settled its run after the rule read the run mark.
                records = Records(session, name)
                answer = rule(records)
                changes = records.changes()
            if changes and wanted.write:
                session.commit(changes)
            return answer

    def _read(self, name: LockName, rule: Callable[[Records], T]) -> T:
        return self.run(name, rule, _READ)

    # -- locks

    def acquire(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | Refusal:
        plain = self.backend.acquire_plain(name, acquisition, ttl_ms, request)
        if plain is not None:
            return plain
        identity = request.identity.digest if request.identity else ""
        wanted = Wanted(
            (
                ("tombstone", acquisition),
                *((("done", identity),) if identity else ()),
                *((("run", request.tick),) if request.once else ()),
            ),
            (identity,) if identity and request.queue else (),
        )

        rule = _rule(name, acquire, seats.acquire, acquisition, ttl_ms, request)
        # After a lost reply, the caller abandons this acquisition.
        return self._run_once(name, rule, wanted)

    def renew(self, renewals: Sequence[Renewal], within: float | None = None) -> list[RenewalResult]:
        plain = call_again_if_reply_lost(self.backend.renew_plain, renewals, within)
        answers: list[RenewalResult] = list(plain)
        reached, refusal = any(answers), None
        for number, renewal in enumerate(renewals):
            if answers[number] is not None:
                continue
            try:
                answers[number] = self._renew(renewal, within)
                reached = True
            except (StoreNotReady, StoreRefused) as error:
                refusal = error  # of this name: the others may be renewed
            except StoreUnavailable:
                if not reached:
                    raise
                break
        if refusal is not None and not reached:
            raise refusal
        return answers

    def _renew(self, renewal: Renewal, within: float | None) -> RenewalResult:
        name, acquisition, ttl_ms, facts, stoppable = renewal

        renew = functools.partial(release.renew, stoppable=stoppable)
        return self.run(name, _rule(name, renew, seats.renew, acquisition, ttl_ms, facts), Wanted(within=within))

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        wanted = Wanted((("run", ending.tick),), (ending.identity,) if ending.identity and ending.queue else ())

        rule = _rule(name, release.release, seats.release, acquisition, ending)

        def once() -> Released:
            plain = self.backend.release_plain(name, acquisition, ending)
            return self._run_once(name, rule, wanted) if plain is None else plain

        try:
            return once()
        except ReplyTimeout:
            raise
        except ReplyLost:
            # The first release may have freed the lock, so the second reply cannot prove a lost lease.
            return once()._replace(ours=True)

    def shard(self, name: LockName) -> int:
        del name
        return 0

    def inspect(self, name: LockName) -> Holder | None:
        return self._read(name, _rule(name, release.inspect, seats.inspect))

    def guard(self, name: LockName, acquisition: str, connection: Any, settles: ReleaseRequest | None = None) -> bool:
        lock_guard = self.backend.guard_of(connection)
        made = self.run(name, lambda records: guard.guard(records, acquisition, settles))
        if made is None:
            return False
        locked = False
        try:
            locked = lock_guard(name, made)
        finally:
            if not locked and (settled := made.settled) is not None:
                self.run(name, lambda records: runs.put_run_back(records, settled))
        return locked

    def release_listener(self, name: LockName) -> ReleaseListener:
        return self.backend.release_listener(name)

    def close(self) -> None:
        self.backend.close()

    # -- last runs

    def last_run(self, name: LockName, tick: str = "") -> RunView | None:
        return self._read(name, lambda records: runs.last_run(records, name.text, tick))

    def forget_run(self, name: LockName, tick: str = "", mark: str = "") -> bool:
        command_id = uuid.uuid4().hex
        return self.run(name, lambda records: runs.forget_run(records, tick, command_id, mark))

    def resolve_run(self, name: LockName, *, sent: bool, window_ms: int, tick: str = "", mark: str = "") -> bool:
        command_id = uuid.uuid4().hex
        return self.run(
            name, lambda records: runs.resolve_run(records, tick, command_id, mark, sent=sent, window_ms=window_ms)
        )

    # -- claims

    def claim(self, publications: Sequence[tuple[LockName, ClaimRequest]]) -> list[ExistingCall | None]:
        return [
            self.run(name, lambda records, request=request: claims.claim(records, request))  # type: ignore[misc]
            for name, request in publications
        ]

    def release_claim(self, name: LockName, task_id: str, generation: int, attempt: str = "") -> bool:
        return self.run(name, lambda records: claims.release_claim(records, task_id, generation, attempt))

    def extend_claims(self, extended: Sequence[ClaimExtension]) -> None:
        for one in extended:
            extend = functools.partial(claims.extend_claim, task_id=one.task_id, life_ms=one.life_ms)
            self.run(one.name, extend)

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
        options = granter, grant_timeout_ms, tries, foreign_ms, pause_ms
        return self.run(name, _rule(name, queue.sweep, seats.sweep, *options))

    def confirm_publish(self, name: LockName, identity: str, grant_timeout_ms: int) -> bool:
        return self.run(name, _rule(name, queue.confirm_publish, seats.confirm_publish, identity, grant_timeout_ms))

    def decline_grant(self, name: LockName, grant: Grant, *, foreign: bool, present: bool = False) -> bool:
        return self.run(
            name, _rule(name, queue.decline_grant, seats.decline_grant, grant, foreign=foreign, present=present)
        )

    def remove_waiter(
        self, name: LockName, identity: str, granter: str, *, dead_letter: bool = False, ended: bool = False
    ) -> QueueStepResult:
        options = {"dead_letter": dead_letter, "ended": ended}
        rule = _rule(name, queue.remove_waiter, seats.remove_waiter, identity, granter, **options)
        return self.run(name, rule, Wanted(waiters=(identity,)))

    def mark_done(self, name: LockName, identity: str, owner: str, age_us: int) -> None:
        self.run(name, _rule(name, runs.mark_done, seats.mark_done, identity, owner, age_us))

    def list_waiters(self, name: LockName, most: int) -> Waiting:
        return self._read(name, _rule(name, queue.list_waiters, seats.list_waiters, name.text, most))

    def list_due_queues(self, buckets: Sequence[int], most: int, within: float = 0.0) -> list[LockName]:
        return self.backend.due(buckets, most, round(within * 1e6))

    def dead_letters_at(self, name: LockName) -> str:
        return f"{self.backend.shown} (dead letters of {name.text})"

    # -- workers

    def info(self) -> StoreInfo:
        return self.backend.info()

    def sweep_lease(self, broker: str, duty: str, worker: str, life_ms: int) -> int:
        name = shared.shared_name("duty", duty, broker)
        return self.run(name, lambda records: shared.take_duty(records, worker, life_ms))

    def save_worker_record(self, node: str, worker: str, text: str, life_ms: int) -> None:
        name = shared.shared_name("worker", node)
        self.run(name, lambda records: shared.save_record(records, worker, text, life_ms))

    def worker_records(self, node: str) -> dict[str, str]:
        return self._read(shared.shared_name("worker", node), lambda records: records.marks("worker"))

    def announce_workers(self, broker: str, life_ms: int) -> None:
        name = shared.shared_name("broker", broker)
        self.run(name, lambda records: shared.save_record(records, "", "running", life_ms))

    def has_workers(self, broker: str) -> bool:
        return self._read(shared.shared_name("broker", broker), lambda records: bool(records.mark("worker", "")))

    # -- operators

    def scan(
        self,
        kinds: Iterable[State],
        cursor: str,
        limit: int,
        wanted: Callable[[str], bool],
        accepted: Callable[[LockView], bool],
    ) -> Page[LockView]:
        states, total = frozenset(kinds), self.backend.count()
        begun, after = _read_cursor(cursor) if cursor else ("name", None)
        items: list[LockView] = []
        scanned = 0
        for listed in _SCANNED[_SCANNED.index(begun) :]:
            for name, detail in self._listed(listed, after):
                scanned += 1
                views = self._views(listed, name, detail) if wanted(name.text) else []
                items += [view for view in views if not states.isdisjoint(view.states) and accepted(view)]
                if len(items) >= limit:
                    return Page(items, f"{listed} {name.bucket} {name.text} {detail}", scanned, max(scanned, total))
            after = None
        return Page(items, "", scanned, max(scanned, total))

    def _views(self, listed: Listed, name: LockName, tick: str) -> list[LockView]:
        if listed == "run":
            return [self.describe(name, tick)] if tick else []
        held = self._read(name, Records.taken_seats)
        return [self.describe(name), *(self.describe(one_seat(name, seat)) for seat in held if seat)]

    def _listed(self, listed: Listed, after: ListCursor | None) -> Iterator[tuple[LockName, str]]:
        """Yield the lock names and details of a list, behind a cursor."""
        while found := self.backend.cursors(listed, after, _BATCH):
            yield from ((LockName(one.name, one.bucket), one.detail) for one in found)
            after = found[-1]

    def describe(self, name: LockName, tick: str = "") -> LockView:
        of_seat = name.seats == ONE_SEAT
        return self._read(name, lambda records: operator.describe(records, name.text, tick, of_seat=of_seat))

    def unsettled_runs(self, after: ListCursor | None = None) -> Iterator[RunView]:
        for name, tick in self._listed("run", after):
            view = self._read(name, lambda records, of=(name.text, tick): runs.last_run(records, *of))  # type: ignore[misc]
            if view is not None and view.state != "used":
                yield view

    def dead_letters(self, after: ListCursor | None = None) -> Iterator[DeadLetter]:
        for name, identity in self._listed("dead", after):
            of = name.text, identity
            yield from self.run(name, lambda records, of=of: operator.shown_dead_letters(records, *of))  # type: ignore[misc]

    def queues(self, after: ListCursor | None = None) -> Iterator[LockName]:
        for name, _ in self._listed("queue", after):
            yield from (name._replace(seats=number) for number in self._read(name, Records.sweeps))

    def seats(self, name: LockName) -> int:
        record = None if name.seats == ONE_SEAT else self._read(name, Records.seats)
        return record.limit if record is not None else 1

    def free(self, name: LockName, acquisition: str, *, force: bool) -> tuple[str, Grant | None]:
        return self.run(name, lambda records: operator.free_lock(records, acquisition, force=force))

    def hold(self, name: LockName, operator_: str, hold_ms: int, reason: str) -> bool:
        return self.run(name, lambda records: operator.hold_lock(records, operator_, hold_ms, reason))

    def cancel_hold(self, name: LockName, acquisition: str, hold: str) -> bool:
        return self.run(name, lambda records: operator.cancel_hold(records, acquisition, hold))

    def requeue(self, name: LockName, identity: str) -> bool:
        return self.run(name, lambda records: queue.requeue(records, identity))

    def save_audit(self, at: float, record: str) -> None:
        self.run(shared.shared_name("audit"), lambda records: shared.save_audit(records, round(at * 1e6), record))

    def audit(self, limit: int) -> list[str]:
        return self._read(shared.shared_name("audit"), lambda records: shared.audit(records, limit))

    def now(self) -> float:
        return self.backend.now()

    def clock_offsets(self) -> dict[str, float]:
        before = time.time()
        now = self.backend.now()
        return {self.backend.shown: now - (before + time.time()) / 2}


def _read_cursor(cursor: str) -> tuple[Listed, ListCursor]:
    listed, bucket, name, detail, *more = [*cursor.split(" "), "", "", ""]
    for known in _SCANNED:
        if known == listed and bucket.isdecimal() and len(more) == 3:  # noqa: PLR2004  # the three added texts
            return known, ListCursor(int(bucket), name, detail)
    raise ValueError(f"invalid cursor {cursor[:40]!r}: expected the cursor of the page before")


def _rule(
    name: LockName, of_lock: Callable[..., T], of_seats: Callable[..., T], *arguments: Any, **options: Any
) -> Callable[[Records], T]:
    """Return the rule for a lock, or for a name with seats (``limit``). The name of one seat is one lock."""
    if name.seats in (ONE_LOCK, ONE_SEAT):
        return lambda records: of_lock(records, *arguments, **options)
    return lambda records: of_seats(records, name.seats, *arguments, **options)
