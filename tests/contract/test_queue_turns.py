"""The queue's scripts against a real server: turns that are lost, dead letters, and sweeps."""

import pytest
import redis

from celery_dlock.errors import StoreRefused
from celery_dlock.keys.key_spec import BUCKETS
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import FOREIGN_MS, QueueStepResult, ReleaseRequest
from celery_dlock.store.model import Acquired, AcquireRequest, Identity, Requester
from celery_dlock.store.redis.keys import LockKeys, sweeper_key
from celery_dlock.store.redis.store import _NO_DEAD_LETTERS, RedisStore
from tests.contract.queue_helpers import (
    INDEX,
    KEYS,
    LATER,
    NAME,
    PARKED,
    SECOND,
    TRIES,
    TTL,
    TURN,
    digest,
    ending,
    entry_of,
    expire,
    grant_to,
    lose_turn,
    make_due,
    make_ready,
    now_us,
    park,
    rank_in,
    take,
    waiting,
    whose,
)
from tests.support.polling import eventually
from tests.support.servers import LOCK_USER

# Turns


@pytest.mark.invariant("failed-grants-pass-on")
@pytest.mark.core
def test_failed_grant_is_postponed_and_the_next_waiter_is_granted(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    rank = int(client.hget(KEYS.lock, "rank") or 0)
    park(store, "b.1", "b")
    store.confirm_publish(NAME, digest("a"), TURN)
    make_due(client)
    before = now_us(client)
    taken = store.sweep(NAME, "s.1", TURN, TRIES)
    assert whose(taken.granted) == digest("b")
    assert taken.dead_letter == ""
    until = client.zscore(LATER, digest("a")) or 0
    assert client.zcard(LATER) == 1
    assert before + TURN * 1000 <= until <= now_us(client) + TURN * 1000
    assert client.hgetall(PARKED) == {
        digest("a"): entry_of("a"),
        f"{digest('a')}:tries": "1",
        f"{digest('a')}:rank": str(rank),
        digest("b"): entry_of("b"),
    }


@pytest.mark.invariant("failed-grants-pass-on")
@pytest.mark.core
def test_waiter_with_a_failed_grant_returns_at_its_old_rank(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    for who in "bc":
        park(store, f"{who}.1", who)
    lose_turn(store, client, "a")
    make_ready(client, "a")
    take(store, "b.2", "b", grant_id=client.hget(KEYS.lock, "since"))
    assert whose(store.release(NAME, "b.2", ending("b")).granted) == digest("a")


@pytest.mark.invariant("failed-grants-pass-on")
@pytest.mark.core
def test_only_waiter_is_granted_again_at_once_after_its_first_failed_grant(
    store: RedisStore, client: redis.Redis
) -> None:
    """Its worker has probably died. The copy of the first grant, if the broker still has it, does not run."""
    first = grant_to(store, "a")
    rank = client.hget(KEYS.lock, "rank")
    assert store.confirm_publish(NAME, digest("a"), TURN)
    make_due(client)
    swept = store.sweep(NAME, "s.1", TURN, TRIES)
    assert swept.lost_grant
    assert swept.granted is not None
    assert (swept.granted.identity, swept.granted.entry) == (digest("a"), entry_of("a"))
    assert client.hget(KEYS.lock, "rank") == rank
    assert not client.exists(LATER)
    assert store.sweep(NAME, "s.1", TURN, TRIES).granted == swept.granted
    assert store.confirm_publish(NAME, digest("a"), TURN)
    late = park(store, "a.2", "a", grant_id=first.grant_id, republished=True)
    assert late.granted is None
    take(store, "a.3", "a", grant_id=swept.granted.grant_id, republished=True)
    assert not client.exists(*KEYS.queue()[:3])


@pytest.mark.invariant("failed-grants-pass-on")
@pytest.mark.core
def test_grant_timeout_and_pause_double_with_each_failed_grant(store: RedisStore, client: redis.Redis) -> None:
    """The pause follows from the second one on: after the first, the only waiter is granted again at once."""
    grant_to(store, "a")
    for lost in range(4):
        before = now_us(client)
        assert store.confirm_publish(NAME, digest("a"), TURN)
        due = int(client.hget(KEYS.lock, "due") or 0)
        assert due - before == pytest.approx(TURN * 1000 * 2**lost, abs=10 * SECOND)
        make_due(client)
        before = now_us(client)
        swept = store.sweep(NAME, "s.1", TURN, TRIES)
        if lost:
            assert swept == QueueStepResult(lost_grant=True)
            until = client.zscore(LATER, digest("a"))
            assert until
            assert until - before == pytest.approx(TURN * 1000 * 2**lost, abs=10 * SECOND)
            assert client.zscore(INDEX, NAME.text) == until
            make_ready(client, "a")
            swept = store.sweep(NAME, "s.1", TURN, TRIES)
        assert whose(swept.granted) == digest("a")


@pytest.mark.core
def test_waiter_with_too_many_failed_grants_becomes_a_dead_letter_unchanged(
    store: RedisStore, client: redis.Redis
) -> None:
    grant_to(store, "a")
    for lost in range(1, 4):
        buried = lose_turn(store, client, "a", tries=3)
        assert buried == (digest("a") if lost == 3 else "")
        if lost == 2:
            make_ready(client, "a")
            store.sweep(NAME, "s.1", TURN, 3)
    assert client.hgetall(KEYS.named("dead")) == {digest("a"): entry_of("a")}
    assert not client.exists(KEYS.lock, *KEYS.queue())


@pytest.mark.core
def test_a_late_copy_of_a_dead_letter_takes_its_entry_out_and_runs(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    assert lose_turn(store, client, "a", tries=1) == digest("a")
    take(store, "a.2", "a", republished=True, rank_us=10, grant_id="123")
    assert not client.exists(KEYS.named("dead"))


@pytest.mark.core
def test_a_late_copy_of_a_dead_letter_that_has_to_wait_takes_its_entry_out_and_parks(
    store: RedisStore, client: redis.Redis
) -> None:
    grant_to(store, "a")
    assert lose_turn(store, client, "a", tries=1) == digest("a")
    take(store, "h.1", "h")
    park(store, "a.2", "a", republished=True, rank_us=10)
    assert not client.exists(KEYS.named("dead"))
    assert waiting(client) == [digest("a")]


@pytest.mark.invariant("failed-grants-pass-on")
@pytest.mark.core
def test_parking_again_forgets_failed_grants(store: RedisStore, client: redis.Redis) -> None:
    """Its copy was late, not lost: slow rounds must not add up to a dead letter."""
    grant_to(store, "a")
    rank = int(client.hget(KEYS.lock, "rank") or 0)
    park(store, "b.1", "b")
    lose_turn(store, client, "a")
    park(store, "a.2", "a", republished=True, rank_us=rank)
    assert client.hgetall(PARKED) == {digest("a"): entry_of("a"), digest("b"): entry_of("b")}
    assert not client.exists(LATER)
    assert rank_in(client, "a") == rank


@pytest.mark.invariant("grants-end-by-script")
@pytest.mark.core
def test_unpublished_grant_is_published_again_and_is_not_a_failed_grant(store: RedisStore, client: redis.Redis) -> None:
    granted = grant_to(store, "a")
    for number in range(3 * TRIES):
        assert store.sweep(NAME, f"early.{number}", TURN, TRIES) == QueueStepResult()
        make_due(client)
        assert store.sweep(NAME, f"s.{number}", TURN, TRIES) == QueueStepResult(granted=granted)
    assert client.hgetall(PARKED) == {digest("a"): entry_of("a")}


# Sweeps


@pytest.mark.invariant("grants-end-by-script")
@pytest.mark.core
def test_a_sweep_grants_a_lock_whose_lease_ended(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    assert store.list_due_queues([NAME.bucket], 10) == []
    expire(client)
    assert store.list_due_queues([NAME.bucket], 10) == [NAME]
    assert whose(store.sweep(NAME, "s.1", TURN, TRIES).granted) == digest("a")
    assert store.list_due_queues([NAME.bucket], 10) == []


@pytest.mark.core
def test_sweep_is_due_again_when_a_renewed_lease_would_end(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    client.zadd(INDEX, {NAME.text: 1})
    before = now_us(client)
    assert store.sweep(NAME, "s.1", TURN, TRIES) == QueueStepResult()
    look = client.zscore(INDEX, NAME.text)
    assert look
    assert before < look <= now_us(client) + TTL * 1000
    assert store.release(NAME, "h.1", ReleaseRequest()).granted


@pytest.mark.invariant("grants-end-by-script")
@pytest.mark.core
def test_a_sweep_tells_a_holder_of_another_policy_that_others_wait(store: RedisStore, client: redis.Redis) -> None:
    """The holder named no keys of the queue when it took the lock; without the field its release grants no waiter."""
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    expire(client)
    skips = store.acquire(NAME, "s.1", TTL, AcquireRequest(Requester("app.skips", "s", "node1", "77"), Identity("s")))
    assert isinstance(skips, Acquired)
    assert client.hget(KEYS.lock, "has_waiters") is None
    assert store.sweep(NAME, "sweeper.1", TURN, TRIES) == QueueStepResult()
    assert client.hget(KEYS.lock, "has_waiters") == "1"
    assert whose(store.release(NAME, "s.1", ending("s", queue=False)).granted) == digest("a")


@pytest.mark.core
def test_sweep_marks_a_holder_of_another_policy_for_a_waiter_with_failed_grants(
    store: RedisStore, client: redis.Redis
) -> None:
    """The only waiter is not in `waiting` but in `later`."""
    grant_to(store, "a")
    lose_turn(store, client, "a")
    lose_turn(store, client, "a")
    assert isinstance(
        store.acquire(NAME, "s.1", TTL, AcquireRequest(Requester("app.skips", "s", "node1", "77"), Identity("s"))),
        Acquired,
    )
    assert store.sweep(NAME, "s.2", TURN, TRIES) == QueueStepResult()
    assert client.hget(KEYS.lock, "has_waiters") == "1"
    make_ready(client, "a")
    assert whose(store.release(NAME, "s.1", ending("s", queue=False)).granted) == digest("a")


def test_sweep_of_a_lock_without_waiters_forgets_it(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    store.remove_waiter(NAME, digest("a"), "t.1")
    client.zadd(INDEX, {NAME.text: 1})
    assert store.sweep(NAME, "s.1", TURN, TRIES) == QueueStepResult()
    assert not client.exists(INDEX)


def test_each_bucket_tells_of_its_own_locks_at_most_so_many(store: RedisStore, client: redis.Redis) -> None:
    names = [LockName(f"n:{number}", bucket) for bucket in (3, 4) for number in range(3)]
    for name in names:
        client.zadd(LockKeys.of("dlock", name).queue()[3], {name.text: 1})
    assert store.list_due_queues([3, 4, 5], 10) == names
    assert store.list_due_queues([4], 10) == names[3:]
    assert len(store.list_due_queues([3, 4], 2)) == 4


@pytest.mark.core
def test_sweep_reads_all_buckets_by_one_script_and_in_a_cluster_by_one_per_queue(
    store: RedisStore, client: redis.Redis, topology: str
) -> None:
    def scripts() -> int:
        told = client.info("commandstats", **({"target_nodes": "primaries"} if topology == "cluster" else {}))
        nodes = told.values() if topology == "cluster" else [told]
        return sum(node.get("cmdstat_evalsha", {"calls": 0})["calls"] for node in nodes)

    buckets = [0, 63, 64, 1023]
    for bucket in buckets:
        client.zadd(LockKeys.of("dlock", LockName("n:x", bucket)).queue()[3], {"n:x": 1})
    store.list_due_queues(range(BUCKETS), 10)
    before = scripts()
    assert [name.bucket for name in store.list_due_queues(range(BUCKETS), 10)] == buckets
    assert scripts() - before == (len(buckets) if topology == "cluster" else 1)


@pytest.mark.invariant("sweep-failures-stay-local")
@pytest.mark.core
def test_cluster_node_that_refuses_hides_no_queue_of_another_node(
    store: RedisStore, client: redis.Redis, topology: str
) -> None:
    if topology != "cluster":
        pytest.skip("it is about several nodes")
    names = [LockName("n:x", bucket) for bucket in (3, 4)]
    for name in names:
        client.zadd(LockKeys.of("dlock", name).queue()[3], {name.text: 1})
    client.delete(LockKeys.of("dlock", names[0]).queue()[3])
    node = client.get_node_from_key(LockKeys.of("dlock", names[0]).lock)  # type: ignore[attr-defined]
    assert node != client.get_node_from_key(LockKeys.of("dlock", names[1]).lock)  # type: ignore[attr-defined]
    client.execute_command(f"ACL SETUSER {LOCK_USER} -exists -evalsha -eval", target_nodes=node)
    try:
        assert store.list_due_queues([3, 4], 10) == names[1:]
        with pytest.raises(StoreRefused, match="NOPERM"):
            store.list_due_queues([3], 10)
    finally:
        client.execute_command(f"ACL SETUSER {LOCK_USER} +exists +evalsha +eval", target_nodes=node)


@pytest.mark.invariant("sweep-failures-stay-local")
@pytest.mark.core
def test_overwritten_index_hides_no_other_bucket(store: RedisStore, client: redis.Redis) -> None:
    names = [LockName("n:x", bucket) for bucket in (3, 4, 5)]
    for name in names:
        client.zadd(LockKeys.of("dlock", name).queue()[3], {name.text: 1})
    client.set(LockKeys.of("dlock", names[0]).queue()[3], "overwritten")
    assert store.list_due_queues([4, 3, 5], 10) == names[1:]
    with pytest.raises(StoreRefused, match="overwrote a key"):
        store.list_due_queues([3, 6], 10)


# The sweep lease

DUTY = "amqp://h:5672//", "sweep"
LEASE = sweeper_key("dlock", *DUTY)


@pytest.mark.invariant("one-sweeper-per-broker")
@pytest.mark.core
def test_one_worker_at_a_time_has_the_sweep_lease_and_may_take_it_again(store: RedisStore, client: redis.Redis) -> None:
    assert store.sweep_lease(*DUTY, "w1", 60_000) == 0
    assert 50_000 < store.sweep_lease(*DUTY, "w2", 60_000) <= 60_000
    assert store.sweep_lease(*DUTY, "w1", 90_000) == 0
    assert 80_000 < client.pttl(LEASE) <= 90_000
    client.pexpire(LEASE, 1)
    eventually(lambda: not client.exists(LEASE))
    assert store.sweep_lease(*DUTY, "w2", 60_000) == 0


@pytest.mark.core
@pytest.mark.parametrize("life_ms", [3_600_000, None])
def test_a_sweep_lease_with_a_longer_life_than_asked_for_is_cut(
    store: RedisStore, client: redis.Redis, life_ms: int | None
) -> None:
    """The server's clock went back; a dead worker would keep all others from sweeping."""
    client.set(LEASE, "dead", px=life_ms)
    assert store.sweep_lease(*DUTY, "w1", 60_000) == 60_000
    assert 0 < client.pttl(LEASE) <= 60_000


# Messages of another broker


def make_foreign(client: redis.Redis, seconds: float) -> None:
    """Only workers of other brokers have come for so long, and the next sweep is due."""
    client.hset(KEYS.lock, "foreign", str(now_us(client) - round(seconds * SECOND)))
    make_due(client)


@pytest.mark.core
def test_grant_of_another_broker_is_due_at_once(store: RedisStore, client: redis.Redis) -> None:
    granted = grant_to(store, "a")
    before = now_us(client)
    assert store.decline_grant(NAME, granted, foreign=True)
    due, noted = client.hmget(KEYS.lock, "due", "foreign")
    assert before <= int(due or 0) <= now_us(client)
    assert client.zscore(INDEX, NAME.text) == int(due or 0)
    assert store.decline_grant(NAME, granted, foreign=True)
    assert client.hget(KEYS.lock, "foreign") == noted
    assert store.sweep(NAME, "s.1", TURN, TRIES) == QueueStepResult(granted=granted)


@pytest.mark.invariant("foreign-messages-block-no-name")
@pytest.mark.core
def test_a_grant_that_no_worker_of_its_broker_published_becomes_a_dead_letter(
    store: RedisStore, client: redis.Redis
) -> None:
    granted = grant_to(store, "a")
    park(store, "b.1", "b")
    store.decline_grant(NAME, granted, foreign=True)
    make_foreign(client, FOREIGN_MS / 1000 - 60)
    assert store.sweep(NAME, "s.1", TURN, TRIES) == QueueStepResult(granted=granted)
    make_foreign(client, FOREIGN_MS / 1000 + 1)
    first = store.sweep(NAME, "s.2", TURN, TRIES)
    assert (first.dead_letter, first.foreign_broker, whose(first.granted)) == (digest("a"), True, digest("b"))
    assert store.sweep(NAME, "s.2", TURN, TRIES) == first
    assert client.hgetall(KEYS.named("dead")) == {digest("a"): entry_of("a")}
    assert client.hget(KEYS.lock, "foreign") is None


@pytest.mark.invariant("foreign-messages-block-no-name")
@pytest.mark.core
def test_a_grant_that_a_worker_of_its_broker_cannot_publish_is_no_dead_letter(
    store: RedisStore, client: redis.Redis
) -> None:
    """Its broker is away: the message waits, however long that takes."""
    granted = grant_to(store, "a")
    store.decline_grant(NAME, granted, foreign=True)
    make_foreign(client, 3600)
    assert store.decline_grant(NAME, granted, foreign=False)
    assert store.sweep(NAME, "s.1", TURN, TRIES) == QueueStepResult(granted=granted)


@pytest.mark.core
def test_grant_of_another_broker_that_has_workers_is_due_at_once_and_no_dead_letter(
    store: RedisStore, client: redis.Redis
) -> None:
    """Their broker does not answer just now; that is no reason for workers of another broker to give up."""
    granted = grant_to(store, "a")
    store.decline_grant(NAME, granted, foreign=True)
    make_foreign(client, 3600)
    before = now_us(client)
    assert store.decline_grant(NAME, granted, foreign=True, present=True)
    assert before <= int(client.hget(KEYS.lock, "due") or 0) <= now_us(client)
    assert store.sweep(NAME, "s.1", TURN, TRIES) == QueueStepResult(granted=granted)


@pytest.mark.core
def test_a_published_grant_is_of_no_other_broker(store: RedisStore, client: redis.Redis) -> None:
    granted = grant_to(store, "a")
    store.confirm_publish(NAME, digest("a"), TURN)
    before = client.hgetall(KEYS.lock)
    assert not store.decline_grant(NAME, granted, foreign=True)
    assert not store.decline_grant(NAME, granted._replace(grant_id="1"), foreign=True)
    assert client.hgetall(KEYS.lock) == before


@pytest.mark.core
def test_grant_that_its_own_broker_published_late_loses_a_turn_and_is_no_dead_letter(
    store: RedisStore, client: redis.Redis
) -> None:
    granted = grant_to(store, "a")
    store.decline_grant(NAME, granted, foreign=True)
    make_foreign(client, FOREIGN_MS / 1000 + 1)
    assert store.confirm_publish(NAME, digest("a"), TURN)
    make_due(client)
    swept = store.sweep(NAME, "s.1", TURN, TRIES)
    assert (swept.lost_grant, swept.dead_letter, whose(swept.granted)) == (True, "", digest("a"))
    assert not client.exists(KEYS.named("dead"))


@pytest.mark.core
def test_grant_of_an_earlier_turn_is_not_passed_on(store: RedisStore, client: redis.Redis) -> None:
    """The worker was paused meanwhile; its note would be one about the new turn."""
    granted = grant_to(store, "a")
    before = client.hgetall(KEYS.lock)
    assert not store.decline_grant(NAME, granted._replace(grant_id="1"), foreign=True)
    assert client.hgetall(KEYS.lock) == before


def test_a_release_that_sweeps_buries_no_message_of_another_broker(store: RedisStore, client: redis.Redis) -> None:
    """It would not tell of it. A sweep hands the message out to a sweeper, which does."""
    granted = grant_to(store, "a")
    store.decline_grant(NAME, granted, foreign=True)
    make_foreign(client, 3600)
    assert store.sweep(NAME, "h.1", *_NO_DEAD_LETTERS).dead_letter == ""
