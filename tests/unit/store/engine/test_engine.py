"""The engine: what it does with a commit that fails, and what a rule sees of its own changes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlock.errors import ReplyLost, ReplyTimeout, StoreBusy, StoreNotReady, StoreUnavailable
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.backend import Changes, Session, Wanted
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.memory.backend import MemoryBackend, MemoryClock
from celery_dlock.store.model import Acquired, AcquireRequest, Held, Renewal, Requester
from celery_dlock.store.rules.data import Head
from celery_dlock.store.rules.records import Records
from tests.support.faulty_backend import FaultyBackend, conflict, lost_reply

pytestmark = pytest.mark.core

NAME, OTHER = shared_name("x"), shared_name("y")
REQUEST = AcquireRequest(Requester.of(None, None, "node1", 77))
WAITS = REQUEST._replace(notify=True)
START = 1_800_000_000_000_000


@pytest.fixture
def memory() -> MemoryBackend:
    return MemoryBackend(MemoryClock(lambda: START))


def faulty(memory: MemoryBackend, fault: Callable[[Session, Changes], None], times: int) -> EngineStore:
    """Return a store whose next commits fail."""
    left = [times]

    def fails() -> bool:
        left[0] -= 1
        return left[0] >= 0

    backend: Any = FaultyBackend(memory, fails, fault)
    return EngineStore(backend)


def times_out(_session: Session, _changes: Changes) -> None:
    raise ReplyTimeout("the test was slow")


def test_rule_whose_commit_conflicts_runs_again_on_fresh_data(memory: MemoryBackend) -> None:
    EngineStore(memory).acquire(NAME, "o.1", 30_000, REQUEST)

    def overtaken(session: Session, changes: Changes) -> None:
        EngineStore(memory).release(NAME, "o.1", ReleaseRequest())
        conflict(session, changes)

    memory.mutex = nullcontext()  # type: ignore[assignment]  # the other transaction commits within the session
    answer = faulty(memory, overtaken, 1).acquire(NAME, "p.1", 30_000, WAITS)
    assert isinstance(answer, Acquired)


def test_commit_that_conflicts_wakes_no_call(memory: MemoryBackend) -> None:
    EngineStore(memory).acquire(NAME, "o.1", 30_000, REQUEST)
    EngineStore(memory).acquire(NAME, "p.1", 30_000, WAITS)
    memory.timeout = 0.0
    with pytest.raises(StoreBusy, match="other transactions changed"):
        faulty(memory, conflict, 100).release(NAME, "o.1", ReleaseRequest())
    assert not EngineStore(memory).release_listener(NAME).wait(0)
    assert EngineStore(memory).release(NAME, "o.1", ReleaseRequest()).woke
    assert EngineStore(memory).release_listener(NAME).wait(0)


def test_conflicts_until_the_timeout_end_in_an_error_and_change_nothing(memory: MemoryBackend) -> None:
    memory.timeout = 0.02
    with pytest.raises(StoreBusy, match=r"is too busy: within 0\.02 s, other transactions changed x:"):
        faulty(memory, conflict, 10**9).acquire(NAME, "o.1", 30_000, REQUEST)
    assert EngineStore(memory).inspect(NAME) is None


def test_renewal_gives_up_on_conflicts_when_its_answer_is_of_no_use(memory: MemoryBackend) -> None:
    EngineStore(memory).acquire(NAME, "o.1", 30_000, REQUEST)
    memory.timeout = 3600.0
    with pytest.raises(StoreBusy, match=r"within 0\.01 s"):
        faulty(memory, conflict, 10**9).renew([Renewal(NAME, "o.1", 60_000)], within=0.01)


def test_verb_whose_reply_is_lost_is_sent_again_once(memory: MemoryBackend) -> None:
    EngineStore(memory).acquire(NAME, "o.1", 30_000, REQUEST)
    released = faulty(memory, lost_reply, 1).release(NAME, "o.1", ReleaseRequest(outcome_unknown=True))
    assert released.ours
    with pytest.raises(ReplyLost):
        faulty(memory, lost_reply, 2).release(NAME, "p.1", ReleaseRequest(outcome_unknown=True))


def test_acquire_whose_reply_is_lost_is_left_to_its_caller(memory: MemoryBackend) -> None:
    store = faulty(memory, lost_reply, 1)
    with pytest.raises(ReplyLost):
        store.acquire(NAME, "o.1", 30_000, REQUEST)
    assert isinstance(store.acquire(NAME, "o.1", 30_000, REQUEST), Acquired)


VERBS: list[Callable[[EngineStore], Any]] = [
    lambda store: store.release(NAME, "o.1", ReleaseRequest()),
    lambda store: store.hold(OTHER, "operator:me@host", 1000, "why"),
]


@pytest.mark.parametrize("verb", VERBS, ids=["release", "hold"])
def test_verb_that_timed_out_is_not_sent_again(memory: MemoryBackend, verb: Callable[[EngineStore], Any]) -> None:
    EngineStore(memory).acquire(NAME, "o.1", 30_000, REQUEST)
    with pytest.raises(ReplyTimeout):
        verb(faulty(memory, times_out, 1))


def test_renewals_after_one_that_fails_are_unknown_and_the_ones_before_are_renewed(memory: MemoryBackend) -> None:
    store = EngineStore(memory)
    for name in (NAME, OTHER):
        store.acquire(name, "o.1", 30_000, REQUEST)
    renewals = [Renewal(NAME, "o.1", 60_000), Renewal(OTHER, "o.1", 60_000), Renewal(NAME, "p.1", 60_000)]
    left = iter([False, True])
    broken: Any = FaultyBackend(memory, lambda: next(left), times_out)
    assert EngineStore(broken).renew(renewals) == [True, None, None]
    with pytest.raises(StoreUnavailable):
        faulty(memory, times_out, 1).renew([renewals[1]._replace(ttl_ms=90_000)])


def test_rule_that_fails_changes_nothing(memory: MemoryBackend) -> None:
    def rule(records: Records) -> None:
        records.put_mark("done", "a", "1", 1000)
        raise LookupError

    store = EngineStore(memory)
    with pytest.raises(LookupError):
        store.run(NAME, rule)
    assert store.run(NAME, lambda records: records.mark("done", "a")) is None


def test_refused_acquire_that_leaves_the_lock_unchanged_commits_nothing(memory: MemoryBackend) -> None:
    EngineStore(memory).acquire(NAME, "o.1", 30_000, REQUEST)
    assert isinstance(faulty(memory, times_out, 1).acquire(NAME, "p.1", 30_000, REQUEST), Held)


def test_change_of_a_head_removes_what_has_expired(memory: MemoryBackend) -> None:
    store = EngineStore(memory)
    store.acquire(NAME, "o.1", 30_000, REQUEST)
    memory.clock.travel(31)
    store.run(NAME, lambda records: records.sweep_at(1))
    assert memory.data(NAME).head.locks == {}


def test_tokens_grow_while_the_clock_stands_still(memory: MemoryBackend) -> None:
    store, tokens = EngineStore(memory), []
    for number in range(3):
        answer = store.acquire(NAME, f"o.{number}", 30_000, REQUEST)
        assert isinstance(answer, Acquired)
        tokens.append(answer.token)
        store.release(NAME, f"o.{number}", ReleaseRequest())
    assert tokens == [START, START + 1, START + 2]


IDENTITIES = st.sampled_from("abcdef")
CHANGES = st.lists(st.tuples(IDENTITIES, st.integers(0, 3) | st.none()), max_size=8)


@given(CHANGES, CHANGES, st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_rule_sees_its_own_changes_of_the_waiters(
    before: list[tuple[str, int | None]], changed: list[tuple[str, int | None]], most: int, low: int, high: int
) -> None:
    """Part of the waiters is read from the backend, and the rule has changed others."""
    expected: dict[str, int] = {}
    store = EngineStore(MemoryBackend())

    def apply(records: Records, changes: list[tuple[str, int | None]]) -> None:
        for identity, score in changes:
            if score is None:
                records.take_from("waiting", identity)
                expected.pop(identity, None)
            else:
                records.put_in("waiting", identity, score)
                expected[identity] = score

    def check(records: Records) -> None:
        found = sorted(expected.items(), key=lambda item: (item[1], item[0]))
        assert records.count_in("waiting") == len(found)
        assert records.first_in("waiting", most) == found[:most]
        within = [item for item in found if low <= item[1] <= high]
        assert records.first_in("waiting", most, until=high, since=low) == within[:most]
        places = {identity: place for place, (identity, _) in enumerate(found)}
        for identity in "abcdef":
            assert records.position_in("waiting", identity) == places.get(identity)

    store.run(NAME, lambda records: apply(records, before))
    store.run(NAME, lambda records: (apply(records, changed), check(records)))
    store.run(NAME, check)


class PlainReplyLost(MemoryBackend):
    """Its plain paths lose their first reply: before they have done it, or after it."""

    carried_out = False
    lost = False

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            raise ReplyLost("the server restarted")

    def release_plain(self, name: Any, acquisition: str, ending: ReleaseRequest) -> None:
        if self.carried_out and not self.lost:
            with self.open(name, Wanted()) as session:
                session.commit(Changes(head=Head()))
        self._lose()

    def renew_plain(self, renewals: Any, within: float | None) -> list[None]:
        self._lose()
        return [None] * len(renewals)


@pytest.mark.parametrize("carried_out", [False, True])
def test_plain_release_whose_reply_is_lost_is_sent_again_and_is_ours(*, carried_out: bool) -> None:
    backend = PlainReplyLost(MemoryClock(lambda: START))
    backend.carried_out = carried_out
    store = EngineStore(backend)
    store.acquire(NAME, "o.1", 30_000, REQUEST)
    assert store.release(NAME, "o.1", ReleaseRequest()).ours
    assert store.inspect(NAME) is None


def test_plain_renewal_whose_reply_is_lost_is_sent_again() -> None:
    store = EngineStore(PlainReplyLost(MemoryClock(lambda: START)))
    store.acquire(NAME, "o.1", 30_000, REQUEST)
    assert store.renew([Renewal(NAME, "o.1", 30_000)]) == [True]


class Refusing(MemoryBackend):
    """Refuses every transaction on some names."""

    refused: tuple[Any, ...] = ()

    def open(self, name: Any, wanted: Wanted) -> Any:
        if name in self.refused:
            raise StoreNotReady("this row is locked")
        return super().open(name, wanted)


def test_name_that_the_store_refuses_does_not_cost_the_renewal_of_the_others() -> None:
    backend = Refusing(MemoryClock(lambda: START))
    store, names = EngineStore(backend), [NAME, OTHER, shared_name("z")]
    for name in names:
        store.acquire(name, "o.1", 30_000, REQUEST)
    renewals = [Renewal(name, "o.1", 30_000) for name in names]
    for refused in names:
        backend.refused = (refused,)
        assert store.renew(renewals) == [None if name == refused else True for name in names]
    backend.refused = tuple(names)
    with pytest.raises(StoreNotReady):
        store.renew(renewals)
