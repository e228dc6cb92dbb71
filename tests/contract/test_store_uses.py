"""The states of a name's run mark, and the callers that may change them."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.keys.lock_name import idempotency_key
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, AcquireRequest, Held, Identity, Requester, Unknown, Used
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import SCRIPTS, Script
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import TTL, Party, cut_reply, ending_of, of_one_acquisition, request_of, take
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.stores import store_at

NAME = shared_name("x")
KEYS = LockKeys.of("dlock", NAME)
WINDOW = 60_000


def once(task_id: str, **facts: Any) -> AcquireRequest:
    return request_of(task_id, once=True, **facts)


def begin(store: RedisStore, task_id: str, **facts: Any) -> Acquired:
    return take(store, f"{task_id}.1", once(task_id, **facts))


def fail(store: RedisStore, task_id: str, acquisition: str = "") -> None:
    ending = ending_of(task_id, once=True, window_ms=WINDOW)
    store.release(NAME, acquisition or f"{task_id}.1", ending)


def succeed(store: RedisStore, task_id: str, seed: str) -> None:
    store.release(NAME, f"{task_id}.1", ending_of(task_id, once=True, used_ms=WINDOW, window_ms=WINDOW, seed=seed))


def die(store: RedisStore, task_id: str) -> None:
    """As the watchdog ends what a dead child held."""
    store.release(NAME, f"{task_id}.1", ReleaseRequest(outcome_unknown=True))


def state(store: RedisStore) -> tuple[str, str | None] | None:
    use = store.last_run(NAME)
    return use and (use.state, use.task_id)


@pytest.mark.invariant("death-is-no-failure")
@pytest.mark.core
def test_a_body_that_died_is_of_unknown_outcome_however_its_lock_ended(store: RedisStore, client: redis.Redis) -> None:
    begin(store, "a")
    assert state(store) == ("running", "a")
    client.delete(KEYS.lock)  # as after its ttl
    assert state(store) == ("unknown", "a")
    client.delete(KEYS.run())
    begin(store, "b")
    die(store, "b")
    assert state(store) == ("unknown", "b")


@pytest.mark.core
def test_call_under_hold_is_refused_after_a_death_until_it_is_resolved(store: RedisStore) -> None:
    """The refusal names the process that died."""
    begin(store, "a")
    die(store, "a")
    for _ in range(2):
        answer = store.acquire(NAME, "b.1", TTL, once("b", hold_if_unknown=True))
        assert isinstance(answer, Unknown)
        assert (answer.by.task, answer.by.task_id, answer.by.node) == ("app.post", "a", "node1")
    assert store.resolve_run(NAME, sent=False, window_ms=WINDOW)
    assert isinstance(store.acquire(NAME, "b.1", TTL, once("b", hold_if_unknown=True)), Acquired)


def test_call_under_hold_meets_a_running_body_as_a_held_lock(store: RedisStore) -> None:
    begin(store, "a")
    assert isinstance(store.acquire(NAME, "b.1", TTL, once("b", hold_if_unknown=True)), Held)


@pytest.mark.invariant("idempotency-key-is-stable")
@pytest.mark.core
def test_the_seed_is_kept_over_failures_and_deaths_until_a_success_is_forgotten(store: RedisStore) -> None:
    first = begin(store, "a")
    assert (first.seed, first.after_crash) == (str(first.token), False)
    fail(store, "a")
    assert state(store) is None
    second = begin(store, "b")
    assert (second.seed, second.after_crash) == (first.seed, False)
    die(store, "b")
    third = begin(store, "c")
    assert (third.seed, third.after_crash) == (first.seed, True)
    succeed(store, "c", third.seed)
    use = store.last_run(NAME)
    assert use is not None
    assert (use.state, use.idempotency_key) == ("used", idempotency_key(KEYS.name, first.seed))
    assert store.forget_run(NAME)
    assert begin(store, "d").seed != first.seed


@pytest.mark.invariant("death-is-no-failure")
@pytest.mark.core
def test_a_failure_after_a_death_leaves_that_death_as_unknown_as_it_was(store: RedisStore) -> None:
    begin(store, "a")
    die(store, "a")
    begin(store, "b")
    fail(store, "b")
    assert state(store) == ("unknown", "a")
    assert begin(store, "c").after_crash
    # It had used the name, as an operator finds out later: then a copy of its own message is no other call's.
    fail(store, "c")
    assert store.resolve_run(NAME, sent=True, window_ms=WINDOW)
    answer = store.acquire(NAME, "a.2", TTL, once("a"))
    assert isinstance(answer, Used)
    assert answer.same_message


@pytest.mark.invariant("no-unknown-outcome-without-a-body")
@pytest.mark.core
def test_only_the_run_whose_mark_it_is_makes_the_name_free(store: RedisStore, client: redis.Redis) -> None:
    """A body whose lease was lost fails late; the one that runs since then may have died by then, or be at work."""
    begin(store, "a")
    client.delete(KEYS.lock)
    begin(store, "b")
    fail(store, "a")
    assert state(store) == ("running", "b")
    die(store, "b")
    fail(store, "a")
    assert state(store) == ("unknown", "b")


def test_a_late_success_uses_the_name_although_another_runs_or_died(store: RedisStore, client: redis.Redis) -> None:
    seed = begin(store, "a").seed
    client.delete(KEYS.lock)
    begin(store, "b")
    succeed(store, "a", seed)
    assert state(store) == ("used", "a")
    fail(store, "b")
    assert state(store) == ("used", "a")


def test_an_acquire_that_was_taken_back_leaves_no_doubt(store: RedisStore) -> None:
    """Its body never began."""
    begin(store, "a")
    undone = ReleaseRequest(identity=Identity("a").digest, outcome_unknown=True, once=True, window_ms=WINDOW)
    store.release(NAME, "a.1", undone)
    assert isinstance(store.acquire(NAME, "b.1", TTL, once("b", hold_if_unknown=True)), Acquired)


@pytest.mark.core
@pytest.mark.parametrize("sent", [True, False])
def test_a_resolved_name_is_used_for_the_window_or_free_with_its_seed(store: RedisStore, sent: bool) -> None:
    seed = begin(store, "a").seed
    die(store, "a")
    assert store.resolve_run(NAME, sent=sent, window_ms=WINDOW)
    assert not store.resolve_run(NAME, sent=sent, window_ms=WINDOW)
    answer = store.acquire(NAME, "b.1", TTL, once("b", hold_if_unknown=True))
    if sent:
        assert isinstance(answer, Used)
        assert answer.by.task_id == "a"
    else:
        assert isinstance(answer, Acquired)
        assert (answer.seed, answer.after_crash) == (seed, False)


def test_running_used_or_free_name_cannot_be_resolved(store: RedisStore) -> None:
    assert not store.resolve_run(NAME, sent=True, window_ms=WINDOW)
    seed = begin(store, "a").seed
    assert not store.resolve_run(NAME, sent=True, window_ms=WINDOW)
    assert state(store) == ("running", "a")
    succeed(store, "a", seed)
    assert not store.resolve_run(NAME, sent=False, window_ms=WINDOW)
    assert state(store) == ("used", "a")


def test_begin_mark_outlives_its_window_by_the_longest_body(store: RedisStore, client: redis.Redis) -> None:
    """The mark of a free name does not."""
    begin(store, "a", run_mark_ms=WINDOW + 5000)
    assert WINDOW < client.pttl(KEYS.run()) <= WINDOW + 5000
    fail(store, "a")
    assert WINDOW - 5000 < client.pttl(KEYS.run()) <= WINDOW


def test_a_new_run_removes_two_expired_runs_of_its_bucket_from_the_index(
    store: RedisStore, client: redis.Redis
) -> None:
    expired = {"gone1 ": 1, "gone2 ": 2, "gone3 ": 3}
    client.zadd(KEYS.named("unsettled"), expired)
    client.pexpire(KEYS.named("unsettled"), 10 * WINDOW)
    begin(store, "a", run_mark_ms=WINDOW)
    assert client.zrange(KEYS.named("unsettled"), 0, -1) == ["gone3 ", f"{KEYS.run()} "]


def test_index_of_runs_outlives_each_mark_and_ends_with_the_last_success(
    store: RedisStore, client: redis.Redis
) -> None:
    begin(store, "a", run_mark_ms=WINDOW)
    assert WINDOW < client.pttl(KEYS.named("unsettled")) <= 2 * WINDOW
    succeed(store, "a", "1")
    assert not client.exists(KEYS.named("unsettled"))


def test_each_tick_has_a_mark_of_its_own(store: RedisStore) -> None:
    begin(store, "a", tick="t1")
    ending = ending_of("a", once=True, used_ms=WINDOW, window_ms=WINDOW, tick="t1")
    store.release(NAME, "a.1", ending)
    assert isinstance(store.acquire(NAME, "b.1", TTL, once("b", tick="t1")), Used)
    assert store.last_run(NAME, "t1")
    assert store.last_run(NAME) is None
    assert isinstance(store.acquire(NAME, "b.2", TTL, once("b", tick="t2")), Acquired)


@pytest.mark.parametrize("garbage", ["", "x", "used", "1\nx\n[]", "begun\n\n\n\n\n\n\n\n\n\n\n"])
def test_mark_of_another_run_blocks_no_call(store: RedisStore, client: redis.Redis, garbage: str) -> None:
    """Whatever a foreign hand wrote, the next run writes over it."""
    client.set(KEYS.run(), garbage)
    assert store.last_run(NAME) is None
    answer = store.acquire(NAME, "a.1", TTL, once("a"))
    assert isinstance(answer, Acquired)
    assert answer.seed == str(answer.token)


# Sent twice, and answers that get lost


class TestSentTwice:
    def test_an_acquire(self, store: RedisStore, topology: str) -> None:
        begin(store, "z")
        die(store, "z")
        first = begin(store, "a")
        again = begin(store, "a")
        assert (again.seed, again.after_crash) == (first.seed, True)
        assert of_one_acquisition(first, again, topology)

    def test_an_acquire_whose_name_was_forgotten_between(self, store: RedisStore, topology: str) -> None:
        first = begin(store, "a")
        store.forget_run(NAME)
        again = begin(store, "a")
        assert again.seed == str(again.token)
        assert of_one_acquisition(first, again, topology)

    def test_an_acquire_whose_lock_was_lost_between_is_no_death(self, store: RedisStore, client: redis.Redis) -> None:
        begin(store, "a")
        client.delete(KEYS.lock)
        assert not begin(store, "a", hold_if_unknown=True).after_crash

    @pytest.mark.parametrize("died_before", [False, True])
    def test_a_failure(self, store: RedisStore, died_before: bool) -> None:
        if died_before:
            begin(store, "z")
            die(store, "z")
        begin(store, "a")
        for _ in range(2):
            fail(store, "a")
            assert state(store) == (("unknown", "z") if died_before else None)

    def test_a_failure_after_another_has_begun(self, store: RedisStore) -> None:
        begin(store, "a")
        fail(store, "a")
        begin(store, "b")
        fail(store, "a")
        assert state(store) == ("running", "b")


class TestLostReplies:
    @pytest.fixture
    def far(self, proxy: Proxy, store: RedisStore) -> Iterator[RedisStore]:
        """The store over a network that cuts replies; its scripts are known there."""
        far = store_at(proxy.url(), timeout=2)
        for warm in (lambda: far.forget_run(NAME), lambda: far.resolve_run(NAME, sent=True, window_ms=1)):
            warm()
        yield far
        far.close()

    @pytest.mark.parametrize("script", [SCRIPTS["forget_run"], SCRIPTS["resolve_run"]], ids=["forget", "resolve"])
    def test_caller_that_resolves_a_name_gets_a_confirmation(
        self, far: RedisStore, store: RedisStore, proxy: Proxy, script: Script
    ) -> None:
        begin(store, "a")
        die(store, "a")
        cut_reply(proxy, script)
        done = (
            far.forget_run(NAME)
            if script is SCRIPTS["forget_run"]
            else far.resolve_run(NAME, sent=True, window_ms=WINDOW)
        )
        assert done
        assert state(store) == (None if script is SCRIPTS["forget_run"] else ("used", "a"))

    @pytest.mark.invariant("no-unknown-outcome-without-a-body")
    @pytest.mark.core
    def test_an_acquire_whose_reply_is_lost_is_no_death(self, proxy: Proxy, store: RedisStore) -> None:
        """The lock client takes it back and asks again under the next number: nothing has begun under the first."""
        party = Party(proxy.url(), timeout=2)
        party.release(party.acquire(NAME))
        party.context.rollback = ReleaseRequest(
            identity=Identity("a").digest, outcome_unknown=True, once=True, window_ms=WINDOW
        )
        cut_reply(proxy, SCRIPTS["acquire"])
        request = AcquireRequest(
            Requester.of("app.post", "a", "node1", 77), Identity("a"), once=True, hold_if_unknown=True
        )
        lease: Any = party.lock_client.acquire(NAME, party.context, 30.0, request)
        assert lease.acquisition.endswith(".3")
        assert not lease.after_crash
        assert len(lease.idempotency_key) == 32
        party.release(lease, ReleaseRequest(identity=Identity("a").digest, once=True, window_ms=WINDOW))
        eventually(lambda: not party.lease_table.records(), within=10)

    def test_a_failure_whose_reply_is_lost_leaves_the_name_free(self, proxy: Proxy, store: RedisStore) -> None:
        far = store_at(proxy.url(), timeout=2)
        fail(far, "warm")
        begin(store, "a")
        cut_reply(proxy, SCRIPTS["release"])
        fail(far, "a")
        far.close()
        assert state(store) is None
