"""A lock that a run keeps for its own retry: only the retry takes it."""

import pytest
import redis

from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import (
    Acquired,
    AcquireRequest,
    Duplicate,
    Held,
    Identity,
    Queued,
    QueueRequest,
    Requester,
    Unknown,
    Used,
)
from celery_dlock.store.redis.store import RedisStore
from tests.contract import queue_helpers
from tests.contract.helpers import NAME, TTL, keys_of, of_one_acquisition, request_of, take

KEYS = keys_of()
LIFE = 60_000


def request_for(task_id: str, retries: int = 0, **facts: object) -> AcquireRequest:
    return AcquireRequest(Requester("app.post", task_id, "node1", "77"), Identity(task_id, retries), **facts)  # type: ignore[arg-type]


def kept_for(task_id: str, *, retries: int = 1, life_ms: int = LIFE, **facts: object) -> ReleaseRequest:
    successor = Identity(task_id, retries).digest
    first = Identity(task_id, retries - 1).digest
    return ReleaseRequest(final=True, identity=first, reserved_for=successor, reserved_ms=life_ms, **facts)  # type: ignore[arg-type]


@pytest.fixture
def kept(store: RedisStore) -> RedisStore:
    """The lock was taken by task "a", which retried itself."""
    take(store, "a.1", request_for("a"))
    assert store.release(NAME, "a.1", kept_for("a")).ours
    return store


@pytest.mark.core
def test_its_retry_takes_it_with_a_new_token(store: RedisStore) -> None:
    first = take(store, "a.1", request_for("a"))
    store.release(NAME, "a.1", kept_for("a"))
    second = take(store, "a.2", request_for("a", 1))
    assert second.token > first.token
    holder = store.inspect(NAME)
    assert holder
    assert (holder.owner, holder.identity, holder.kind) == ("a", Identity("a", 1).digest, "owner")


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
@pytest.mark.core
@pytest.mark.parametrize(
    "rival",
    [
        request_of(),
        request_for("b"),
        request_for("b", 1),
        request_for("a", 0),
        request_for("a", 2),
        request_for("b", once=True),
    ],
    ids=["a Lock", "another task", "another retry", "the message that was retried", "a later retry", "once_per"],
)
def test_every_other_call_meets_a_held_lock(kept: RedisStore, rival: AcquireRequest) -> None:
    answer = kept.acquire(NAME, "b.1", TTL, rival)
    assert isinstance(answer, Held)
    assert not answer.same_message
    assert answer.holder.kind == "keep_on_retry"
    assert (answer.holder.task, answer.holder.task_id) == ("app.post", "a")
    assert 50 < answer.holder.expires_in <= 60
    assert str(answer.holder) == "app.post[a] on node1 (its retry is to come: keep_on_retry)"


def test_a_retry_that_never_comes_frees_it_by_its_life(store: RedisStore, client: redis.Redis) -> None:
    take(store, "a.1", request_for("a"))
    store.release(NAME, "a.1", kept_for("a", life_ms=5000))
    assert 0 < client.pttl(KEYS.lock) <= 5000
    client.pexpire(KEYS.lock, -1)  # it passes
    take(store, "b.1", request_for("b"))
    # The retry comes at last: it has no more right than others.
    assert isinstance(store.acquire(NAME, "a.2", TTL, request_for("a", 1)), Held)


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
@pytest.mark.parametrize("redelivered", [True, False])
def test_reservation_ends_when_a_copy_of_its_finished_message_arrives(kept: RedisStore, redelivered: bool) -> None:
    """Its retry has finished already, so no message will take the lock."""
    retry = Identity("a", 1)
    kept.mark_done(NAME, retry.digest, "another", 0)
    rank_us = None if redelivered else 1
    answer = kept.acquire(NAME, "a.2", TTL, request_for("a", 1, redelivered=redelivered, rank_us=rank_us))
    assert isinstance(answer, Duplicate)
    assert kept.inspect(NAME) is None
    take(kept, "b.1", request_for("b"))


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
def test_reservation_ends_when_its_retry_is_refused_for_a_used_name(kept: RedisStore) -> None:
    by = Requester("app.post", "z", "node1", "77")
    kept.release(NAME, "z.1", ReleaseRequest(True, Identity("z").digest, 60_000, by.text, once=True))
    assert isinstance(kept.acquire(NAME, "a.2", TTL, request_for("a", 1, once=True)), Used)
    assert kept.inspect(NAME) is None


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
def test_reservation_ends_when_its_retry_is_refused_for_an_unknown_outcome(store: RedisStore) -> None:
    take(store, "a.1", request_for("a", once=True))
    # The release leaves the run mark alone, as if it came from a process that did not know of it.
    store.release(NAME, "a.1", kept_for("a"))
    answer = store.acquire(NAME, "a.2", TTL, request_for("a", 1, once=True, hold_if_unknown=True))
    assert isinstance(answer, Unknown)
    assert store.inspect(NAME) is None


def test_a_release_or_an_acquire_sent_twice_is_as_one(kept: RedisStore, topology: str) -> None:
    kept.release(NAME, "a.1", kept_for("a"))
    first = take(kept, "a.2", request_for("a", 1))
    kept.release(NAME, "a.1", kept_for("a"))  # late
    assert of_one_acquisition(first, take(kept, "a.2", request_for("a", 1)), topology)


def test_copy_of_the_retry_is_a_duplicate_delivery(kept: RedisStore) -> None:
    take(kept, "a.2", request_for("a", 1))
    answer = kept.acquire(NAME, "a.3", TTL, request_for("a", 1, redelivered=True))
    assert isinstance(answer, Held)
    assert answer.same_message


def test_a_lost_lease_keeps_nothing(store: RedisStore, client: redis.Redis) -> None:
    take(store, "a.1", request_for("a"))
    client.delete(KEYS.lock)
    take(store, "b.1", request_for("b"))
    assert not store.release(NAME, "a.1", kept_for("a")).ours
    holder = store.inspect(NAME)
    assert holder
    assert (holder.task_id, holder.kind) == ("b", "owner")


@pytest.mark.parametrize(("min_hold", "life", "most"), [(90_000, 1_000, 90_000), (1_000, 60_000, 60_000)])
def test_longer_of_min_hold_and_retry_time_counts(
    store: RedisStore, client: redis.Redis, min_hold: int, life: int, most: int
) -> None:
    take(store, "a.1", request_for("a", min_hold_ms=min_hold))
    store.release(NAME, "a.1", kept_for("a", life_ms=life))
    assert most - 5_000 < client.pttl(KEYS.lock) <= most
    assert isinstance(kept_by(store), Held)
    take(store, "a.2", request_for("a", 1))


def kept_by(store: RedisStore) -> object:
    return store.acquire(NAME, "b.1", TTL, request_for("b"))


def test_waiting_call_is_woken_by_the_release_of_the_retry(kept: RedisStore, client: redis.Redis) -> None:
    assert isinstance(kept.acquire(NAME, "b.1", TTL, request_for("b", notify=True)), Held)
    take(kept, "a.2", request_for("a", 1))
    listener = kept.release_listener(NAME)
    kept.release(NAME, "a.2", ReleaseRequest(identity=Identity("a", 1).digest))
    assert listener.wait(5)
    assert not client.exists(KEYS.lock)


def test_a_retry_that_waits_for_its_predecessor_is_woken(store: RedisStore) -> None:
    take(store, "a.1", request_for("a"))
    assert isinstance(store.acquire(NAME, "a.2", TTL, request_for("a", 1, notify=True)), Held)
    listener = store.release_listener(NAME)
    store.release(NAME, "a.1", kept_for("a"))
    assert listener.wait(5)
    take(store, "a.3", request_for("a", 1))


def test_waiting_call_is_woken_if_the_lock_is_kept_and_learns_for_how_long(store: RedisStore) -> None:
    """Else it would look again by its slow poll only, or at the end of the holder's longer lease."""
    take(store, "a.1", request_for("a", min_hold_ms=5000))
    assert isinstance(store.acquire(NAME, "b.1", TTL, request_for("b", notify=True)), Held)
    listener = store.release_listener(NAME)
    store.release(NAME, "a.1", ReleaseRequest(identity=Identity("a").digest))
    assert listener.wait(5)
    answer = kept_by(store)
    assert isinstance(answer, Held)
    assert answer.holder.expires_in <= 5


class TestWaiters:
    """Under the queue policy."""

    NAME, KEYS = queue_helpers.NAME, queue_helpers.KEYS

    @staticmethod
    def retry(store: RedisStore, acquisition: str, entry: str = "") -> object:
        return store.acquire(TestWaiters.NAME, acquisition, TTL, request_for("a", 1, queue=QueueRequest(entry)))

    def test_they_wait_for_the_retry_and_its_release_grants(self, store: RedisStore, client: redis.Redis) -> None:
        queue_helpers.take(store, "a.1", "a")
        queue_helpers.park(store, "b.1", "b")
        released = store.release(self.NAME, "a.1", kept_for("a", queue=True))
        assert (released.ours, released.granted) == (True, None)
        assert queue_helpers.waiting(client) == [queue_helpers.digest("b")]
        assert isinstance(queue_helpers.ask(store, "c.1", "c"), Queued)
        assert isinstance(self.retry(store, "a.2"), Acquired)
        released = store.release(self.NAME, "a.2", ReleaseRequest(True, Identity("a", 1).digest, queue=True))
        assert queue_helpers.whose(released.granted) == queue_helpers.digest("b")

    def test_a_sweep_grants_after_a_retry_that_never_came(self, store: RedisStore, client: redis.Redis) -> None:
        queue_helpers.take(store, "a.1", "a")
        queue_helpers.park(store, "b.1", "b")
        before = queue_helpers.now_us(client)
        store.release(self.NAME, "a.1", kept_for("a", queue=True))
        due = client.zscore(self.KEYS.queue()[3], self.KEYS.name)
        assert due is not None
        assert abs(due - (before + LIFE * 1000)) < 5 * queue_helpers.SECOND
        assert store.sweep(self.NAME, "s.1", queue_helpers.TURN, queue_helpers.TRIES).granted is None
        queue_helpers.expire(client)
        granted = store.sweep(self.NAME, "s.2", queue_helpers.TURN, queue_helpers.TRIES).granted
        assert queue_helpers.whose(granted) == queue_helpers.digest("b")

    @pytest.mark.invariant("kept-lock-belongs-to-its-retry")
    def test_a_retry_that_was_parked_before_the_release_is_granted_it_before_all_others(
        self, store: RedisStore, client: redis.Redis
    ) -> None:
        queue_helpers.take(store, "a.1", "a")
        queue_helpers.park(store, "b.1", "b")
        self.retry(store, "a.2", queue_helpers.entry_of("a"))
        successor = Identity("a", 1).digest
        released = store.release(self.NAME, "a.1", kept_for("a", queue=True))
        assert queue_helpers.whose(released.granted) == successor
        assert store.release(self.NAME, "a.1", kept_for("a", queue=True)).granted == released.granted  # sent twice
        assert queue_helpers.waiting(client) == [queue_helpers.digest("b")]

    def test_retry_of_another_policy_hands_off_to_the_waiters(self, store: RedisStore) -> None:
        take(store, "a.1", request_for("a"), name=self.NAME)
        store.release(self.NAME, "a.1", kept_for("a"))
        queue_helpers.park(store, "b.1", "b")
        take(store, "a.2", request_for("a", 1), name=self.NAME)
        released = store.release(self.NAME, "a.2", ReleaseRequest(True, Identity("a", 1).digest))
        assert queue_helpers.whose(released.granted) == queue_helpers.digest("b")


def test_the_message_itself_that_comes_once_more_is_no_rival_of_its_retry(kept: RedisStore) -> None:
    again = kept.acquire(NAME, "x.1", TTL, request_for("a", redelivered=True))
    assert again == Duplicate()


def test_no_key_is_left_but_the_mark_of_the_message_that_retried_itself(kept: RedisStore, client: redis.Redis) -> None:
    take(kept, "a.2", request_for("a", 1))
    kept.release(NAME, "a.2", ReleaseRequest(True, Identity("a", 1).digest))
    assert sorted(client.keys("*")) == sorted([KEYS.last, KEYS.done(Identity("a").digest)])
