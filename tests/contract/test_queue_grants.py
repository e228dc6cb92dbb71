"""The queue's scripts against a real server: every release grants, and one copy takes the turn."""

import pytest
import redis

from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, Duplicate, Grant, Held, Parked, Queued, Released, Unknown, Used
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import request_of as plain_claim
from tests.contract.queue_helpers import (
    INDEX,
    KEYS,
    NAME,
    PARKED,
    SECOND,
    TTL,
    TURN,
    ask,
    digest,
    ending,
    entry_of,
    expire,
    grant_to,
    lose_turn,
    now_us,
    park,
    take,
    waiting,
    whose,
)

# Grants


@pytest.mark.invariant("every-release-grants")
@pytest.mark.core
@pytest.mark.parametrize("how", ["queue", "another policy", "a Lock", "the watchdog"])
def test_every_release_grants_the_lowest_rank(store: RedisStore, client: redis.Redis, how: str) -> None:
    if how == "queue":
        take(store, "h.1", "h")
    else:
        store.acquire(NAME, "h.1", TTL, plain_claim(None if how == "a Lock" else "h"))
    park(store, "b.1", "b", rank_us=20)
    park(store, "a.1", "a", rank_us=10)
    ends = {
        "queue": ending("h"),
        "another policy": ending("h", queue=False),
        "a Lock": ReleaseRequest(),
        "the watchdog": ReleaseRequest(outcome_unknown=True),
    }
    released = store.release(NAME, "h.1", ends[how])
    turn = client.hget(KEYS.lock, "since") or ""
    assert released == Released(ours=True, duplicate_seen=False, granted=Grant(digest("a"), entry_of("a"), turn))
    assert abs(now_us(client) - int(turn)) < 10 * SECOND


@pytest.mark.invariant("grants-end-by-script")
@pytest.mark.core
def test_a_grant_has_no_expiry_and_is_due_soon_until_it_is_published(store: RedisStore, client: redis.Redis) -> None:
    before = now_us(client)
    grant_to(store, "a")
    after = now_us(client)
    assert client.pttl(KEYS.lock) == -1
    due = int(client.hget(KEYS.lock, "due") or 0)
    assert before + 5 * SECOND <= due <= after + 5 * SECOND
    assert client.zscore(INDEX, NAME.text) == due
    before = now_us(client)
    assert store.confirm_publish(NAME, digest("a"), TURN)
    due = int(client.hget(KEYS.lock, "due") or 0)
    assert before + TURN * 1000 <= due <= now_us(client) + TURN * 1000
    assert client.zscore(INDEX, NAME.text) == due


@pytest.mark.core
def test_published_grant_is_reported_only_while_it_exists(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    assert not store.confirm_publish(NAME, digest("b"), TURN)
    expire(client)
    assert not store.confirm_publish(NAME, digest("a"), TURN)
    assert not client.exists(KEYS.lock)


@pytest.mark.invariant("granted-copy-takes-the-grant")
@pytest.mark.core
def test_the_copy_that_was_published_for_the_turn_takes_it_and_its_entry_is_gone(
    store: RedisStore, client: redis.Redis
) -> None:
    granted = grant_to(store, "a")
    taken = take(store, "a.2", "a", rank_us=10, republished=True, grant_id=granted.grant_id)
    assert taken.token > 0
    assert client.hgetall(PARKED) == {}
    lock = client.hgetall(KEYS.lock)
    assert (lock["acq"], lock["dup"]) == ("a.2", "1")
    assert not lock.keys() & {"due", "granter", "published", "rank"}
    assert 0 < client.pttl(KEYS.lock) <= TTL


@pytest.mark.invariant("granted-copy-takes-the-grant")
@pytest.mark.core
@pytest.mark.parametrize("turn", ["", "123"])
def test_another_copy_leaves_the_grant_and_is_acknowledged(store: RedisStore, client: redis.Redis, turn: str) -> None:
    grant_to(store, "a")
    store.confirm_publish(NAME, digest("a"), TURN)
    before = client.hgetall(KEYS.lock), client.hgetall(PARKED)
    for parks in (False, True):
        answer = ask(store, "a.3", "a", rank_us=10, grant_id=turn, parks=parks)
        assert isinstance(answer, Parked)
        assert (answer.granted, answer.evicted) == (None, None)
    assert (client.hgetall(KEYS.lock), client.hgetall(PARKED)) == before


@pytest.mark.invariant("waiters-are-not-overtaken")
@pytest.mark.core
def test_a_plain_lock_meets_a_grant_as_a_held_lock(store: RedisStore) -> None:
    grant_to(store, "a")
    answer = store.acquire(NAME, "l.1", TTL, plain_claim())
    assert isinstance(answer, Held)
    assert (answer.same_message, answer.holder.task_id, answer.holder.pid) == (False, "a", 0)
    assert 0 < answer.holder.expires_in <= 5
    assert str(answer.holder) == "app.post[a] (granted, not started)"


@pytest.mark.core
def test_the_last_release_leaves_nothing_but_the_counter(store: RedisStore, client: redis.Redis) -> None:
    granted = grant_to(store, "a")
    park(store, "b.1", "b")
    store.confirm_publish(NAME, granted.identity, TURN)
    take(store, "a.2", "a", grant_id=granted.grant_id)
    second = store.release(NAME, "a.2", ending("a")).granted
    assert second
    take(store, "b.2", "b", grant_id=second.grant_id)
    assert store.release(NAME, "b.2", ending("b")).granted is None
    marks = [KEYS.done(digest(who)) for who in "ab"]
    assert sorted(client.scan_iter("*")) == sorted([KEYS.last, *marks])


# Copies


@pytest.mark.invariant("running-message-is-no-waiter")
@pytest.mark.core
def test_duplicate_of_the_running_message_is_never_parked(store: RedisStore, client: redis.Redis) -> None:
    take(store, "a.1", "a")
    for parks in (False, True):
        answer = ask(store, "a.2", "a", redelivered=True, parks=parks)
        assert isinstance(answer, Held)
        assert answer.same_message
    assert not client.exists(*KEYS.queue())
    assert store.release(NAME, "a.1", ending("a")).duplicate_seen


@pytest.mark.invariant("finished-message-is-not-queued")
@pytest.mark.core
@pytest.mark.parametrize("why", ["done", "used"])
def test_granted_message_that_must_not_run_passes_the_grant_on(
    store: RedisStore, client: redis.Redis, why: str
) -> None:
    granted = grant_to(store, "a")
    park(store, "b.1", "b")
    mark = {KEYS.done(digest("a")): "9" * 16, KEYS.run(): 'used\n1\nx\na.1\n5\n["t", "i", "n", "1"]\n\n\n'}
    key = KEYS.done(digest("a")) if why == "done" else KEYS.run()
    client.set(key, mark[key])
    answer = ask(store, "a.2", "a", grant_id=granted.grant_id, republished=True, once=True)
    assert isinstance(answer, Duplicate if why == "done" else Used)
    assert whose(answer.granted) == digest("b")
    assert client.hkeys(PARKED) == [digest("b")]
    assert client.hget(KEYS.lock, "acq") == f"grant:{digest('b')}"


@pytest.mark.core
def test_a_waiting_message_that_is_not_to_run_waits_no_more(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    client.set(KEYS.done(digest("a")), "9" * 16)
    assert ask(store, "a.2", "a", redelivered=True) == Duplicate()
    assert not client.exists(PARKED, KEYS.queue()[0])
    assert client.hget(KEYS.lock, "acq") == "h.1"


@pytest.mark.invariant("duplicates-do-not-run")
@pytest.mark.core
@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("flagged", [True, False])
def test_redelivered_message_is_a_duplicate_and_others_are_judged_by_rank(
    store: RedisStore, client: redis.Redis, carries: bool, flagged: bool
) -> None:
    """The rest is of an id that was used again: the old mark says nothing of it."""
    done_at = now_us(client)
    client.set(KEYS.done(digest("a")), str(done_at))
    answer = ask(store, "a.1", "a", redelivered=flagged, rank_us=done_at + 1 if carries else None)
    assert isinstance(answer, Duplicate if flagged else Acquired)


@pytest.mark.core
def test_run_over_an_old_mark_deletes_it_and_marks_again_at_its_end(store: RedisStore, client: redis.Redis) -> None:
    done_at = now_us(client) - 1
    client.set(KEYS.done(digest("a")), str(done_at))
    take(store, "a.1", "a")
    assert not client.exists(KEYS.done(digest("a")))
    assert store.release(NAME, "a.1", ending("a")).duplicate_seen
    assert int(client.get(KEYS.done(digest("a"))) or 0) > done_at


@pytest.mark.core
def test_new_publication_is_judged_by_its_own_rank_not_by_a_leftover_entry(
    store: RedisStore,
) -> None:
    """Its id was used before, and a caller that did not name the queue's keys reported the end of that run."""
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    store.release(NAME, "lost.1", ending("a", queue=False))
    answer = ask(store, "a.2", "a")
    assert isinstance(answer, Queued)
    assert isinstance(ask(store, "a.3", "a", redelivered=True), Duplicate)


# A holder that lost its lease


@pytest.mark.invariant("finished-message-is-not-queued")
@pytest.mark.core
def test_a_late_final_end_takes_its_own_parked_copy_out(store: RedisStore, client: redis.Redis) -> None:
    take(store, "a.1", "a")
    expire(client)
    take(store, "h.1", "h")
    park(store, "a.2", "a", redelivered=True)
    assert store.release(NAME, "a.1", ending("a")) == Released(ours=False, duplicate_seen=False)
    assert not waiting(client)
    assert not client.exists(PARKED)
    assert isinstance(ask(store, "a.3", "a", redelivered=True), Duplicate)
    assert store.release(NAME, "h.1", ending("h")).granted is None


@pytest.mark.core
def test_a_late_final_end_passes_on_the_turn_of_its_own_parked_copy(store: RedisStore, client: redis.Redis) -> None:
    """Else the lock stays granted, for as long as the turn lasts, to a message that has its end."""
    take(store, "a.1", "a")
    expire(client)
    take(store, "h.1", "h")
    park(store, "a.2", "a", redelivered=True)
    park(store, "b.1", "b")
    assert whose(store.release(NAME, "h.1", ending("h")).granted) == digest("a")
    store.confirm_publish(NAME, digest("a"), TURN)
    assert whose(store.release(NAME, "a.1", ending("a")).granted) == digest("b")
    assert client.hget(KEYS.lock, "acq") == f"grant:{digest('b')}"


def test_an_end_that_is_not_final_leaves_its_parked_copy_waiting(store: RedisStore, client: redis.Redis) -> None:
    take(store, "a.1", "a")
    expire(client)
    take(store, "h.1", "h")
    park(store, "a.2", "a", redelivered=True)
    store.release(NAME, "a.1", ending("a", final=False))
    assert waiting(client) == [digest("a")]


@pytest.mark.parametrize("times", [1, 2])
def test_a_turn_that_is_refused_after_a_death_passes_on_also_when_that_is_sent_twice(
    store: RedisStore, client: redis.Redis, times: int
) -> None:
    granted = grant_to(store, "a")
    park(store, "b.1", "b")
    client.set(KEYS.run(), 'unknown\n1\nx\n\n5\n["t", "i", "n", "1"]\n\n\n')
    for _ in range(times):
        answer = ask(store, "a.2", "a", grant_id=granted.grant_id, republished=True, once=True, hold_if_unknown=True)
        assert isinstance(answer, Unknown)
        assert answer.by.task_id == "i"
        assert answer.granted
        assert answer.granted.identity == digest("b")
    assert client.hget(KEYS.lock, "acq") == f"grant:{digest('b')}"


# Callers that wait in their thread or slot beside the queue


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.core
@pytest.mark.parametrize("next_one", [False, True])
@pytest.mark.parametrize("how", ["sweep", "removal", "used", "late end"])
def test_caller_that_waits_while_a_lock_is_granted_is_woken(
    store: RedisStore, client: redis.Redis, how: str, *, next_one: bool
) -> None:
    """The grant ends without a run. Expected: a wake-up at once, or at the release of the next waiter's run."""
    grant_to(store, "a")
    assert isinstance(store.acquire(NAME, "w.1", TTL, plain_claim(notify=True)), Held)
    if next_one:
        park(store, "b.1", "b")
    if how == "sweep":
        lose_turn(store, client, "a", tries=1)
    elif how == "removal":
        store.remove_waiter(NAME, digest("a"), "s.1")
    elif how == "used":
        client.set(KEYS.done(digest("a")), str(2**52))
        assert isinstance(ask(store, "a.2", "a", redelivered=True), Duplicate)
    else:
        store.release(NAME, "a.9", ending("a"))
    if next_one:
        assert client.hget(KEYS.lock, "acq") == f"grant:{digest('b')}"
        assert not client.exists(KEYS.wake)
        assert client.hget(KEYS.lock, "notify") == "1"
    else:
        assert not client.exists(KEYS.lock)
        assert client.exists(KEYS.wake)


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.parametrize("next_one", [False, True])
def test_wake_up_of_an_ended_grant_reaches_the_caller_that_waits(store: RedisStore, *, next_one: bool) -> None:
    """The same over every store, without a look at its keys."""
    grant_to(store, "a")
    assert isinstance(store.acquire(NAME, "w.1", TTL, plain_claim(notify=True)), Held)
    if next_one:
        park(store, "b.1", "b")
    granted = store.remove_waiter(NAME, digest("a"), "s.1").granted
    if next_one:
        assert granted
        assert isinstance(ask(store, "b.2", "b", grant_id=granted.grant_id), Acquired)
        assert store.release(NAME, "b.2", ending("b")).woke
    else:
        assert store.release_listener(NAME).wait(1.0)
