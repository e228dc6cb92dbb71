"""Marks against a real server: tombstones, done marks, words of duplicates, names that are used."""

import pytest
import redis

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, Duplicate, Held, Identity, Released, Renewal, Tombstoned, Used
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import NAME, TTL, ending_of, keys_of, request_of, take
from tests.support.polling import eventually
from tests.support.stores import name_in

KEYS = keys_of()
DONE = KEYS.done(Identity("id1").digest)
HOUR_MS = 3_600_000


def end(store: RedisStore, acquisition: str = "o.1", task_id: str = "id1", **facts: object) -> Released:
    return store.release(NAME, acquisition, ending_of(task_id, **facts))


def leave_mark(store: RedisStore) -> int:
    """Run ``id1`` to its end while a duplicate asks, so that it is marked done; returns its rank."""
    rank = take(store, "o.1", request_of("id1")).rank_us
    store.acquire(NAME, "duplicate.1", TTL, request_of("id1"))
    assert end(store).duplicate_seen
    return rank


# Tombstones


@pytest.mark.core
def test_an_acquire_that_meets_its_tombstone_is_refused(store: RedisStore, client: redis.Redis) -> None:
    """It was given up before it arrived, so its lock would never be released."""
    assert store.release(NAME, "o.1", ReleaseRequest(outcome_unknown=True)) == Released(
        ours=False, duplicate_seen=False
    )
    assert isinstance(store.acquire(NAME, "o.1", TTL, request_of("id1")), Tombstoned)
    assert not client.exists(KEYS.lock)
    assert take(store, "o.2", request_of("id1"))


@pytest.mark.core
def test_a_tombstone_frees_what_its_acquire_took_and_refuses_late_copies_of_it(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "o.1")
    assert store.release(NAME, "o.1", ReleaseRequest(outcome_unknown=True)).ours
    assert isinstance(store.acquire(NAME, "o.1", TTL, request_of()), Tombstoned)
    assert 0 < client.pttl(KEYS.tombstone("o.1")) <= HOUR_MS


def test_a_release_that_is_sure_leaves_no_tombstone(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1")
    store.release(NAME, "o.1", ReleaseRequest())
    assert not client.exists(KEYS.tombstone("o.1"))


# Done marks


@pytest.mark.core
def test_a_final_end_without_word_or_loss_leaves_no_mark(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1", request_of("id1"))
    assert end(store) == Released(ours=True, duplicate_seen=False)
    assert not client.exists(DONE)


@pytest.mark.invariant("done-is-final")
@pytest.mark.core
@pytest.mark.parametrize("how", ["duplicate", "redelivered", "copied", "watchdog", "lost", "taken over"])
def test_a_final_end_with_word_or_after_a_loss_marks_the_identity_done(
    store: RedisStore, client: redis.Redis, how: str
) -> None:
    take(store, "o.1", request_of("id1", redelivered=how == "redelivered", republished=how == "copied"))
    if how == "duplicate":
        store.acquire(NAME, "p.1", TTL, request_of("id1"))
    elif how == "watchdog":
        store.renew([Renewal(NAME, "o.1", TTL, (("dup", "1"),))])
    elif how in ("lost", "taken over"):
        client.delete(KEYS.lock)
        if how == "taken over":
            take(store, "p.1")
    ours = how not in ("lost", "taken over")
    assert end(store) == Released(ours=ours, duplicate_seen=ours)
    assert 23 * HOUR_MS < client.pttl(DONE) <= 24 * HOUR_MS
    if how == "taken over":
        assert client.hget(KEYS.lock, "acq") == "p.1"


@pytest.mark.invariant("done-is-final")
def test_late_mark_ends_duplicates_and_no_message_sent_after_the_end(store: RedisStore, client: redis.Redis) -> None:
    """An end of which the broker did not learn is stored late if the store was away. Its sender may have gone on."""
    take(store, "o.1", request_of("id1"))
    end(store)
    digest = Identity("id1").digest
    store.mark_done(NAME, digest, "o", 60_000_000)
    first = client.get(DONE)
    store.mark_done(NAME, digest, "o", 0)
    assert client.get(DONE) == first
    assert 23 * HOUR_MS < client.pttl(DONE) <= 24 * HOUR_MS
    assert store.acquire(NAME, "p.1", TTL, request_of("id1", redelivered=True)) == Duplicate()
    assert store.acquire(NAME, "p.2", TTL, request_of("id1", age_us=90_000_000)) == Duplicate()
    assert take(store, "p.3", request_of("id1", age_us=30_000_000))


def test_late_mark_leaves_a_running_message_of_the_same_id_alone(store: RedisStore, client: redis.Redis) -> None:
    """A mark would end the copy that comes when its worker dies."""
    take(store, "p.1", request_of("id1"))
    store.mark_done(NAME, Identity("id1").digest, "o", 60_000_000)
    assert not client.exists(DONE)
    store.mark_done(NAME, Identity("id2").digest, "o", 60_000_000)
    assert client.exists(KEYS.done(Identity("id2").digest))


def test_a_mark_that_comes_before_the_release_of_its_own_run_is_set(store: RedisStore, client: redis.Redis) -> None:
    """Both may wait for a store that is away."""
    take(store, "o.1", request_of("id1"))
    store.mark_done(NAME, Identity("id1").digest, "o", 60_000_000)
    assert client.exists(DONE)


@pytest.mark.invariant("done-is-final")
@pytest.mark.core
def test_an_end_that_is_not_final_marks_nothing_also_with_word_and_after_a_loss(
    store: RedisStore, client: redis.Redis
) -> None:
    """The message is delivered again, and must run."""
    take(store, "o.1", request_of("id1", republished=True))
    assert end(store, final=False) == Released(ours=True, duplicate_seen=True)
    assert end(store, final=False) == Released(ours=False, duplicate_seen=False)
    assert not client.exists(DONE)


# Duplicate or fresh


@pytest.mark.core
def test_a_copy_flagged_redelivered_of_a_done_identity_is_a_duplicate(store: RedisStore) -> None:
    leave_mark(store)
    assert store.acquire(NAME, "p.1", TTL, request_of("id1", redelivered=True)) == Duplicate()


@pytest.mark.invariant("duplicates-do-not-run")
@pytest.mark.core
def test_unflagged_copy_is_a_duplicate_only_if_it_arrived_before_the_end(
    store: RedisStore, client: redis.Redis
) -> None:
    rank = leave_mark(store)
    done_at = int(client.get(DONE) or 0)
    client.set(DONE, done_at, keepttl=True)  # of several servers each has a clock of its own
    assert rank < done_at
    for older in (rank, done_at):
        assert store.acquire(NAME, "p.1", TTL, request_of("id1", rank_us=older)) == Duplicate()
    # By its age: it was received a minute ago, and the mark is later.
    assert store.acquire(NAME, "p.2", TTL, request_of("id1", age_us=60_000_000)) == Duplicate()
    assert take(store, "p.3", request_of("id1", rank_us=done_at + 1)).rank_us == done_at + 1
    end(store, "p.3", final=False)
    assert take(store, "p.4", request_of("id1")).rank_us > done_at


@pytest.mark.invariant("duplicates-do-not-run")
@pytest.mark.core
def test_republished_copy_of_doubtful_age_is_a_duplicate_within_its_doubt(store: RedisStore) -> None:
    """Clocks of two machines measured the age. If they disagree, the copy may have been received before the end."""
    leave_mark(store)
    doubtful = request_of("id1", republished=True, doubt_us=60_000_000)
    assert store.acquire(NAME, "p.1", TTL, doubtful) == Duplicate()
    assert take(store, "p.2", doubtful._replace(doubt_us=0))


@pytest.mark.core
def test_a_done_mark_speaks_of_one_identity_only(store: RedisStore) -> None:
    """Retries and replacements of the same task id are other identities; so are other ids."""
    leave_mark(store)
    for number, identity in enumerate((Identity("id1", 1), Identity("id1", 0, 1), Identity("id2"))):
        request = request_of("id1", redelivered=True)._replace(identity=identity)
        assert isinstance(store.acquire(NAME, f"p.{number}", TTL, request), Acquired)
        store.release(NAME, f"p.{number}", ReleaseRequest())


def test_a_duplicate_is_known_also_while_another_holds_the_lock(store: RedisStore) -> None:
    leave_mark(store)
    take(store, "p.1", request_of("id2"))
    assert store.acquire(NAME, "q.1", TTL, request_of("id1", redelivered=True)) == Duplicate()


def test_an_arrival_keeps_its_rank_however_often_it_asks(store: RedisStore) -> None:
    take(store, "o.1")
    first = store.acquire(NAME, "p.1", TTL, request_of("id1"))
    assert isinstance(first, Held)
    again = store.acquire(NAME, "p.2", TTL, request_of("id1", rank_us=first.rank_us, age_us=5))
    assert isinstance(again, Held)
    assert again.rank_us == first.rank_us


def test_a_rank_is_the_servers_time_less_the_age(store: RedisStore) -> None:
    answer = take(store, "o.1", request_of("id1", age_us=90_000_000))
    assert answer.token - answer.rank_us == 90_000_000


# Duplicates


@pytest.mark.core
@pytest.mark.parametrize("redelivered", [False, True])
def test_duplicate_of_the_holder_differs_from_a_rival_and_marks_the_lock(
    store: RedisStore, client: redis.Redis, redelivered: bool
) -> None:
    take(store, "o.1", request_of("id1"))
    rival = store.acquire(NAME, "p.1", TTL, request_of("id2"))
    assert isinstance(rival, Held)
    assert not rival.same_message
    assert not client.hexists(KEYS.lock, "dup")
    duplicate = store.acquire(NAME, "q.1", TTL, request_of("id1", redelivered=redelivered))
    assert isinstance(duplicate, Held)
    assert duplicate.same_message
    assert client.hget(KEYS.lock, "dup") == "1"
    assert client.hget(KEYS.lock, "acq") == "o.1"


def test_two_locks_without_a_message_are_no_duplicates(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1")
    answer = store.acquire(NAME, "p.1", TTL, request_of())
    assert isinstance(answer, Held)
    assert not answer.same_message
    assert not client.hexists(KEYS.lock, "dup")


# Used names


@pytest.mark.core
def test_a_used_name_refuses_who_asks_for_it_once_and_says_who_used_it(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1", request_of("id1", once=True))
    end(store, used_ms=60_000)
    assert 59_000 < client.pttl(KEYS.run()) <= 60_000
    answer = store.acquire(NAME, "p.1", TTL, request_of("id2", once=True))
    assert isinstance(answer, Used)
    assert (answer.by.task, answer.by.task_id, answer.by.node) == ("app.post", "id1", "node1")
    seconds, _ = client.time()
    assert abs(answer.by.since - seconds) < 10
    assert not answer.same_message
    again = store.acquire(NAME, "q.1", TTL, request_of("id1", once=True))
    assert isinstance(again, Used)
    assert again.same_message


def test_a_used_name_is_no_matter_to_who_does_not_ask_for_it(store: RedisStore) -> None:
    take(store, "o.1", request_of("id1", once=True))
    end(store, used_ms=60_000)
    assert take(store, "p.1", request_of("id2"))


def test_a_used_name_can_be_taken_again_after_its_time(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1", request_of("id1", once=True))
    end(store, used_ms=50)
    eventually(lambda: not client.exists(KEYS.run()))
    assert take(store, "p.1", request_of("id2", once=True))


@pytest.mark.core
def test_a_success_uses_the_name_also_when_the_lease_was_lost(store: RedisStore, client: redis.Redis) -> None:
    take(store, "o.1", request_of("id1", once=True))
    client.delete(KEYS.lock)
    assert not end(store, used_ms=60_000).ours
    assert isinstance(store.acquire(NAME, "p.1", TTL, request_of("id2", once=True)), Used)


def test_two_names_in_one_bucket_have_marks_of_their_own(store: RedisStore) -> None:
    """The bucket is shared, its marks are not."""
    name = shared_name("x")
    sibling = LockKeys.of("dlock", type(name)("sibling", name.bucket))
    take(store, "o.1", request_of("id1", once=True))
    end(store, used_ms=60_000)
    assert take(store, "p.1", request_of("id2", once=True), name=name_in(sibling))
