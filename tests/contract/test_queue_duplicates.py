"""A duplicate of the running message waits before all waiters: it runs if the holder dies, and only then."""

from contextlib import closing
from typing import Any

import pytest
import redis

from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, Duplicate, Grant, Held, Parked, Queued, Replace
from celery_dlock.store.redis.store import RedisStore
from tests.contract.histories import NAMES
from tests.contract.queue_helpers import (
    NAME,
    PARKED,
    TRIES,
    TURN,
    ask,
    digest,
    ending,
    entry_of,
    expire,
    make_ready,
    park,
    request_of,
    take,
    waiting,
    whose,
)
from tests.contract.two_stores import TwoStores
from tests.support.servers import Server

pytestmark = [pytest.mark.core, pytest.mark.invariant("running-message-is-no-waiter")]


def park_duplicate(store: RedisStore, acquisition: str, task_id: str, **facts: Any) -> Any:
    return ask(store, acquisition, task_id, parks=True, park_duplicate=True, redelivered=True, **facts)


@pytest.fixture
def running(store: RedisStore) -> None:
    """``h`` holds the lock, ``a`` and ``b`` wait, and a duplicate of ``h`` is parked."""
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    park(store, "b.1", "b", rank_us=20)
    answer = ask(store, "h.2", "h", redelivered=True)
    assert isinstance(answer, Held)
    assert answer.same_message
    parked = park_duplicate(store, "h.2", "h", rank_us=answer.rank_us)
    assert parked == Parked(answer.rank_us, 0, None, None)


def sweep(store: RedisStore, granter: str = "s.1") -> Grant | None:
    return store.sweep(NAME, granter, TURN, TRIES).granted


@pytest.mark.usefixtures("running")
def test_duplicate_of_a_dead_holder_is_granted_before_all_waiters(store: RedisStore, client: redis.Redis) -> None:
    expire(client)
    granted = sweep(store)
    assert granted == Grant(digest("h"), entry_of("h"), granted.grant_id if granted else "")
    again = take(store, "h.3", "h", republished=True, grant_id=granted.grant_id)
    assert again
    assert whose(store.release(NAME, "h.3", ending("h")).granted) == digest("a")


@pytest.mark.usefixtures("running")
def test_end_of_the_holder_drops_the_duplicate_and_grants_the_next(store: RedisStore, client: redis.Redis) -> None:
    assert whose(store.release(NAME, "h.1", ending("h")).granted) == digest("a")
    assert not client.hexists(PARKED, digest("h"))
    assert waiting(client) == [digest("b")]
    assert isinstance(ask(store, "h.3", "h", redelivered=True), Duplicate)


@pytest.mark.usefixtures("running")
def test_holder_that_ends_without_a_result_passes_the_lock_to_its_duplicate(store: RedisStore) -> None:
    """Its message was requeued, or an earlier worker of the same name has died (crash recovery)."""
    assert whose(store.release(NAME, "h.1", ending("h", final=False)).granted) == digest("h")


@pytest.mark.usefixtures("running")
def test_crash_recovery_passes_the_lock_to_the_duplicate(store: RedisStore) -> None:
    assert whose(store.release(NAME, "h.1", ReleaseRequest()).granted) == digest("h")


@pytest.mark.usefixtures("running")
def test_duplicate_of_a_dead_child_waits_for_the_done_mark(store: RedisStore, client: redis.Redis) -> None:
    """Celery stores the failure of the call a moment after the watchdog's release. Then the call must not run again."""
    assert whose(store.release(NAME, "h.1", ReleaseRequest(outcome_unknown=True)).granted) == digest("a")
    assert waiting(client) == [digest("b")]
    store.mark_done(NAME, digest("h"), "h", 0)
    make_ready(client, "h")
    granted = store.remove_waiter(NAME, digest("a"), "g.1", ended=True).granted
    assert whose(granted) == digest("h")
    assert granted
    answer = ask(store, "h.3", "h", redelivered=True, grant_id=granted.grant_id)
    assert isinstance(answer, Duplicate)
    assert whose(answer.granted) == digest("b")


@pytest.mark.usefixtures("running")
def test_duplicate_of_a_dead_child_without_a_done_mark_runs(store: RedisStore, client: redis.Redis) -> None:
    store.release(NAME, "h.1", ReleaseRequest(outcome_unknown=True))
    make_ready(client, "h")
    assert whose(store.remove_waiter(NAME, digest("a"), "g.1", ended=True).granted) == digest("h")


@pytest.mark.usefixtures("running")
def test_redelivery_during_that_pause_puts_the_duplicate_back_before_all(store: RedisStore) -> None:
    store.release(NAME, "h.1", ReleaseRequest(outcome_unknown=True))
    park(store, "h.3", "h", redelivered=True)
    assert whose(store.remove_waiter(NAME, digest("a"), "g.1", ended=True).granted) == digest("h")


def test_duplicate_is_no_waiter_for_limit_eviction_and_operators(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park_duplicate(store, "h.2", "h")
    assert park(store, "a.1", "a", limit=1, evict_oldest=True).evicted is None
    assert store.list_waiters(NAME, 5).count == 1
    assert park(store, "b.1", "b", limit=1, evict_oldest=True).evicted == Grant(digest("a"), entry_of("a"))
    assert isinstance(ask(store, "c.1", "c", limit=1, parks=True), Queued)
    assert [waiter.task_id for waiter in store.list_waiters(NAME, 5).waiters] == ["b"]
    store.release(NAME, "h.1", ReleaseRequest(outcome_unknown=True))  # "b" is granted the lock
    assert park(store, "d.1", "d", limit=1, evict_oldest=True).evicted is None
    assert park(store, "e.1", "e", limit=1, evict_oldest=True).evicted == Grant(digest("d"), entry_of("d"))
    assert client.hexists(PARKED, digest("h"))


@pytest.mark.usefixtures("running")
def test_revoked_message_that_runs_keeps_its_duplicate(store: RedisStore, client: redis.Redis) -> None:
    """Its end would otherwise be stored over that of the running delivery."""
    assert store.remove_waiter(NAME, digest("h"), "g.1").entry == ""
    assert client.hexists(PARKED, digest("h"))


@pytest.mark.usefixtures("running")
def test_duplicate_that_lost_its_grant_still_precedes_all(store: RedisStore, client: redis.Redis) -> None:
    expire(client)
    sweep(store)
    assert store.list_waiters(NAME, 5).waiters[0].since > 0
    store.confirm_publish(NAME, digest("h"), 0)
    assert whose(sweep(store, "s.2")) == digest("a")
    make_ready(client, "h")
    assert whose(store.remove_waiter(NAME, digest("a"), "g.1", ended=True).granted) == digest("h")


@pytest.mark.usefixtures("running")
def test_two_duplicates_are_one(store: RedisStore, client: redis.Redis) -> None:
    assert isinstance(ask(store, "h.3", "h", redelivered=True), Held)
    park_duplicate(store, "h.3", "h")
    assert waiting(client) == [digest("h"), digest("a"), digest("b")]
    store.release(NAME, "h.1", ending("h"))
    assert client.hlen(PARKED) == 2


def test_lock_that_was_granted_to_another_parks_the_duplicate_as_a_waiter(store: RedisStore) -> None:
    """The holder has died between the refusal and this request."""
    take(store, "h.1", "h")
    parked = park_duplicate(store, "a.1", "a")
    assert parked.position == 1


@pytest.mark.invariant("stores-agree")
def test_memory_and_scripts_agree_on_parked_duplicates(clean_server: Server) -> None:
    name = NAMES[0]
    with closing(clean_server.client()) as client, closing(TwoStores(clean_server, client)) as stores:

        def do(command: Any) -> Any:
            stores.travel(1000)
            answer = stores.do(command)
            stores.check()
            return answer

        def acquire(acquisition: str, task_id: str, **facts: Any) -> Any:
            request = request_of(task_id, **facts)
            return do(lambda store: store.acquire(name, acquisition, 60_000, request))

        assert isinstance(acquire("h.1", "h"), Acquired)
        acquire("a.1", "a", parks=True)
        assert isinstance(acquire("h.2", "h", parks=True), Held)
        assert acquire("h.2", "h", parks=True, park_duplicate=True).position == 0
        assert acquire("b.1", "b", parks=True, limit=1, evict_oldest=True).evicted.identity == digest("a")
        assert stores.local.list_waiters(name, 5).count == 1
        assert do(lambda store: store.release(name, "h.1", ReleaseRequest(outcome_unknown=True))).granted
        assert acquire("c.1", "c", parks=True, limit=1, evict_oldest=True).evicted is None
        stores.travel(16_000_000)
        granted = do(lambda store: store.remove_waiter(name, digest("b"), "g.1", ended=True)).granted
        assert granted.identity == digest("h")
        assert stores.local.list_waiters(name, 5).waiters[0].state == "granted"
        assert isinstance(acquire("h.3", "h", republished=True, grant_id=granted.grant_id), Acquired)


@pytest.mark.invariant("stores-agree")
def test_duplicate_is_no_waiter_for_a_call_under_replace_that_is_not_parked(clean_server: Server) -> None:
    """Tasks with ``queue`` and with ``replace`` share a name."""
    with closing(clean_server.client()) as client, closing(TwoStores(clean_server, client)) as stores:

        def acquire(acquisition: str, task_id: str, **facts: Any) -> Any:
            stores.travel(1000)
            request = request_of(task_id, **facts)
            return stores.do(lambda store: store.acquire(NAMES[0], acquisition, 60_000, request))

        acquire("h.1", "h")
        acquire("h.2", "h", parks=True, park_duplicate=True)
        answer = acquire("r.1", "r", replace=Replace(20_000))
        assert isinstance(answer, Queued)
        assert answer.waiting == 0
