"""The queue's scripts against a real server, law by law: parking, granting, turns, dead letters."""

import json
from typing import Any

import pytest
import redis

from celery_dlock.keys import LockKeys
from celery_dlock.names import LockName
from celery_dlock.records import Acquired, Duplicate, Grant, Held, Parked, Queued, Released, Used, Waiter
from celery_dlock.store import Ending, Taken
from celery_dlock.stores.redis import RedisStore
from tests.contract.kit import claim_of as plain_claim
from tests.contract.queue_kit import (
    KEYS,
    NAME,
    SECOND,
    TRIES,
    TTL,
    TURN,
    ask,
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
)

PARKED = KEYS.queue()[1]
LATER = KEYS.queue()[2]
INDEX = KEYS.queue()[3]


def whose(grant: Grant | None) -> str | None:
    return grant.identity if grant else None


# Parking


@pytest.mark.core
def test_who_meets_a_held_lock_is_told_to_queue_and_parks_only_with_its_entry(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "h.1", "h")
    answer = ask(store, "a.1", "a")
    assert isinstance(answer, Queued)
    assert (answer.waiting, answer.holder and answer.holder.task_id) == (0, "h")
    assert not waiting(client)
    assert park(store, "a.1", "a", rank_us=answer.rank_us) == Parked(answer.rank_us, 1, None, None)
    assert waiting(client) == [digest("a")]
    assert client.hgetall(PARKED) == {digest("a"): entry_of("a")}


@pytest.mark.core
def test_waiters_stand_by_rank_not_by_arrival_at_the_store(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    assert [park(store, f"{who}.1", who, rank_us=rank).position for who, rank in [("b", 20), ("a", 10), ("c", 15)]] == [
        1, 1, 2,
    ]  # fmt: skip
    assert waiting(client) == [digest("a"), digest("c"), digest("b")]


@pytest.mark.core
def test_parking_twice_is_parking_once(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    park(store, "b.1", "b", rank_us=20)
    assert park(store, "a.2", "a", rank_us=10) == Parked(10, 1, None, None)
    assert waiting(client) == [digest("a"), digest("b")]
    assert client.hlen(PARKED) == 2


@pytest.mark.core
def test_a_copy_that_carries_no_rank_parks_at_the_rank_of_its_entry(store: RedisStore, client: redis.Redis) -> None:
    """The broker gives a message again whose worker died between parking and acknowledging: it keeps its place."""
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    park(store, "b.1", "b", rank_us=20)
    answer = ask(store, "a.2", "a", redelivered=True)
    assert isinstance(answer, Queued)
    park(store, "a.2", "a", rank_us=answer.rank_us, redelivered=True)
    assert waiting(client) == [digest("a"), digest("b")]
    assert rank_in(client, "a") == 10


@pytest.mark.core
def test_a_rank_behind_the_elders_is_bumped_and_another_is_left(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    elder = park(store, "a.1", "a", age_us=SECOND)
    bumped = park(store, "b.1", "b", age_us=10 * SECOND, after_us=elder.rank_us)
    assert bumped.rank_us == elder.rank_us + 1
    assert park(store, "c.1", "c", rank_us=elder.rank_us + 5, after_us=elder.rank_us).rank_us == elder.rank_us + 5
    assert waiting(client) == [digest("a"), digest("b"), digest("c")]


def test_who_takes_a_free_lock_behind_an_elder_has_the_bumped_rank_too(store: RedisStore, client: redis.Redis) -> None:
    later = now_us(client) + 60 * SECOND
    assert take(store, "a.1", "a", after_us=later).rank_us == later + 1


@pytest.mark.core
@pytest.mark.parametrize("rank", [2**53 - 2, 9_007_199_254_740_989, 1_795_244_415_123_457])
def test_no_digit_of_a_rank_is_lost_on_its_way_round(store: RedisStore, client: redis.Redis, rank: int) -> None:
    """Doubles are exact up to 2^53; Lua would print 9.007199254741e+15."""
    take(store, "h.1", "h")
    assert park(store, "a.1", "a", rank_us=rank).rank_us == rank
    assert park(store, "b.1", "b", rank_us=1, after_us=rank).rank_us == rank + 1
    assert rank_in(client, "a") == rank
    store.release(KEYS, "h.1", ending("h"))
    assert client.hget(KEYS.lock, "rank") == str(rank)
    lose_turn(store, client, "a")
    assert client.hget(PARKED, f"{digest('a')}:rank") == str(rank)
    make_ready(client, "a")
    make_due(client)
    store.published(KEYS, digest("b"), TURN)
    make_due(client)
    assert whose(store.sweep(KEYS, "s.1", TURN, TRIES).granted) == digest("a")
    assert client.hget(KEYS.lock, "rank") == str(rank)


# A free lock


@pytest.mark.core
def test_a_free_lock_with_a_waiter_before_is_not_taken_but_granted_to_that_waiter(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    expire(client)
    answer = ask(store, "b.1", "b", rank_us=20)
    assert answer == Queued(1, 20, None)
    parked = park(store, "b.1", "b", rank_us=20)
    assert whose(parked.granted) == digest("a")
    assert parked.position == 1
    assert client.hget(KEYS.lock, "acq") == f"grant:{digest('a')}"


@pytest.mark.core
def test_a_free_lock_with_later_waiters_only_is_taken_and_its_release_grants(
    store: RedisStore, client: redis.Redis
) -> None:
    take(store, "h.1", "h")
    park(store, "b.1", "b", rank_us=20)
    expire(client)
    take(store, "a.1", "a", rank_us=10)
    assert whose(store.release(KEYS, "a.1", ending("a")).granted) == digest("b")


@pytest.mark.core
def test_who_waits_itself_takes_no_free_lock_but_is_granted_it_to_be_published(
    store: RedisStore, client: redis.Redis
) -> None:
    """This delivery may be lost to its broker, and with the entry the last trace of the message."""
    take(store, "h.1", "h")
    park(store, "a.1", "a", rank_us=10)
    expire(client)
    parked = park(store, "a.2", "a", rank_us=10, redelivered=True)
    assert whose(parked.granted) == digest("a")
    assert client.hexists(PARKED, digest("a"))


# Grants


@pytest.mark.core
@pytest.mark.parametrize("how", ["queue", "another policy", "a Lock", "the keeper"])
def test_every_release_grants_the_lowest_rank(store: RedisStore, client: redis.Redis, how: str) -> None:
    if how == "queue":
        take(store, "h.1", "h")
    else:
        store.acquire(KEYS, "h.1", TTL, plain_claim(None if how == "a Lock" else "h"))
    park(store, "b.1", "b", rank_us=20)
    park(store, "a.1", "a", rank_us=10)
    ends = {
        "queue": ending("h"),
        "another policy": ending("h", queue=False),
        "a Lock": Ending(),
        "the keeper": Ending(unsure=True),
    }
    released = store.release(KEYS, "h.1", ends[how])
    turn = client.hget(KEYS.lock, "since") or ""
    assert released == Released(ours=True, word=False, granted=Grant(digest("a"), entry_of("a"), turn))
    assert abs(now_us(client) - int(turn)) < 10 * SECOND


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
    assert store.published(KEYS, digest("a"), TURN)
    due = int(client.hget(KEYS.lock, "due") or 0)
    assert before + TURN * 1000 <= due <= now_us(client) + TURN * 1000
    assert client.zscore(INDEX, NAME.text) == due


@pytest.mark.core
def test_a_published_grant_is_told_only_while_it_stands(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    assert not store.published(KEYS, digest("b"), TURN)
    expire(client)
    assert not store.published(KEYS, digest("a"), TURN)
    assert not client.exists(KEYS.lock)


@pytest.mark.core
def test_the_copy_that_was_published_for_the_turn_takes_it_and_its_entry_is_gone(
    store: RedisStore, client: redis.Redis
) -> None:
    granted = grant_to(store, "a")
    taken = take(store, "a.2", "a", rank_us=10, copied=True, turn=granted.turn)
    assert taken.token > 0
    assert client.hgetall(PARKED) == {}
    lock = client.hgetall(KEYS.lock)
    assert (lock["acq"], lock["word"]) == ("a.2", "1")
    assert not lock.keys() & {"due", "granter", "published", "rank"}
    assert 0 < client.pttl(KEYS.lock) <= TTL


@pytest.mark.core
@pytest.mark.parametrize("turn", ["", "123"])
def test_another_copy_leaves_the_grant_and_is_acknowledged(
    store: RedisStore, client: redis.Redis, turn: str
) -> None:
    grant_to(store, "a")
    store.published(KEYS, digest("a"), TURN)
    before = client.hgetall(KEYS.lock), client.hgetall(PARKED)
    for parks in (False, True):
        answer = ask(store, "a.3", "a", rank_us=10, turn=turn, parks=parks)
        assert isinstance(answer, Parked)
        assert (answer.granted, answer.ousted) == (None, None)
    assert (client.hgetall(KEYS.lock), client.hgetall(PARKED)) == before


@pytest.mark.core
def test_a_plain_lock_meets_a_grant_as_a_held_lock(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    answer = store.acquire(KEYS, "l.1", TTL, plain_claim())
    assert isinstance(answer, Held)
    assert (answer.twin, answer.holder.task_id, answer.holder.pid) == (False, "a", 0)
    assert 0 < answer.holder.expires_in <= 5
    assert str(answer.holder) == "app.post[a], whose turn it is"


@pytest.mark.core
def test_the_last_release_leaves_nothing_but_the_counter(store: RedisStore, client: redis.Redis) -> None:
    granted = grant_to(store, "a")
    park(store, "b.1", "b")
    store.published(KEYS, granted.identity, TURN)
    take(store, "a.2", "a", turn=granted.turn)
    second = store.release(KEYS, "a.2", ending("a")).granted
    assert second
    take(store, "b.2", "b", turn=second.turn)
    assert store.release(KEYS, "b.2", ending("b")).granted is None
    marks = [KEYS.done(digest(who)) for who in "ab"]
    assert sorted(client.scan_iter("*")) == sorted([KEYS.last, *marks])


# Copies


@pytest.mark.core
def test_a_twin_of_the_running_message_is_never_parked(store: RedisStore, client: redis.Redis) -> None:
    take(store, "a.1", "a")
    for parks in (False, True):
        answer = ask(store, "a.2", "a", redelivered=True, parks=parks)
        assert isinstance(answer, Held)
        assert answer.twin
    assert not client.exists(*KEYS.queue())
    assert store.release(KEYS, "a.1", ending("a")).word


@pytest.mark.core
@pytest.mark.parametrize("why", ["done", "used"])
def test_a_granted_message_that_is_not_to_run_passes_its_turn_on(
    store: RedisStore, client: redis.Redis, why: str
) -> None:
    granted = grant_to(store, "a")
    park(store, "b.1", "b")
    mark = {KEYS.done(digest("a")): "9" * 16, KEYS.used(): '1\nx\n["t", "i", "n", "1"]'}
    key = KEYS.done(digest("a")) if why == "done" else KEYS.used()
    client.set(key, mark[key])
    answer = ask(store, "a.2", "a", turn=granted.turn, copied=True, once=True)
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


@pytest.mark.core
@pytest.mark.parametrize("carries", [True, False])
def test_a_copy_that_carries_its_rank_is_judged_by_that_alone(store: RedisStore, client: redis.Redis, carries: bool) -> None:
    """Its id was used again: the old mark says nothing of it, whatever the broker flags."""
    done_at = now_us(client)
    client.set(KEYS.done(digest("a")), str(done_at))
    answer = ask(store, "a.1", "a", redelivered=True, rank_us=done_at + 1 if carries else None)
    assert isinstance(answer, Acquired if carries else Duplicate)


@pytest.mark.core
def test_who_starts_over_an_old_mark_deletes_it_and_marks_anew_at_its_end(
    store: RedisStore, client: redis.Redis
) -> None:
    done_at = now_us(client) - 1
    client.set(KEYS.done(digest("a")), str(done_at))
    take(store, "a.1", "a")
    assert not client.exists(KEYS.done(digest("a")))
    assert store.release(KEYS, "a.1", ending("a")).word
    assert int(client.get(KEYS.done(digest("a"))) or 0) > done_at


# A holder that lost its lease


@pytest.mark.core
def test_a_late_final_end_takes_its_own_parked_copy_out(store: RedisStore, client: redis.Redis) -> None:
    take(store, "a.1", "a")
    expire(client)
    take(store, "h.1", "h")
    park(store, "a.2", "a", redelivered=True)
    assert store.release(KEYS, "a.1", ending("a")) == Released(ours=False, word=False)
    assert not waiting(client)
    assert not client.exists(PARKED)
    assert isinstance(ask(store, "a.3", "a", redelivered=True), Duplicate)
    assert store.release(KEYS, "h.1", ending("h")).granted is None


@pytest.mark.core
def test_a_late_final_end_passes_on_the_turn_of_its_own_parked_copy(store: RedisStore, client: redis.Redis) -> None:
    """Else the lock stays granted, for as long as the turn lasts, to a message that has its end."""
    take(store, "a.1", "a")
    expire(client)
    take(store, "h.1", "h")
    park(store, "a.2", "a", redelivered=True)
    park(store, "b.1", "b")
    assert whose(store.release(KEYS, "h.1", ending("h")).granted) == digest("a")
    store.published(KEYS, digest("a"), TURN)
    assert whose(store.release(KEYS, "a.1", ending("a")).granted) == digest("b")
    assert client.hget(KEYS.lock, "acq") == f"grant:{digest('b')}"


def test_an_end_that_is_not_final_leaves_its_parked_copy_waiting(store: RedisStore, client: redis.Redis) -> None:
    take(store, "a.1", "a")
    expire(client)
    take(store, "h.1", "h")
    park(store, "a.2", "a", redelivered=True)
    store.release(KEYS, "a.1", ending("a", final=False))
    assert waiting(client) == [digest("a")]


# Turns


@pytest.mark.core
def test_a_lost_turn_goes_to_later_and_the_next_one_is_granted(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    rank = int(client.hget(KEYS.lock, "rank") or 0)
    park(store, "b.1", "b")
    store.published(KEYS, digest("a"), TURN)
    make_due(client)
    before = now_us(client)
    taken = store.sweep(KEYS, "s.1", TURN, TRIES)
    assert whose(taken.granted) == digest("b")
    assert taken.buried == ""
    [(later, until)] = client.zrange(LATER, 0, -1, withscores=True)
    assert later == digest("a")
    assert before + TURN * 1000 <= until <= now_us(client) + TURN * 1000
    assert client.hgetall(PARKED) == {
        digest("a"): entry_of("a"),
        f"{digest('a')}:tries": "1",
        f"{digest('a')}:rank": str(rank),
        digest("b"): entry_of("b"),
    }


@pytest.mark.core
def test_who_lost_a_turn_comes_back_at_its_old_rank(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    for who in "bc":
        park(store, f"{who}.1", who)
    lose_turn(store, client, "a")
    make_ready(client, "a")
    take(store, "b.2", "b", turn=client.hget(KEYS.lock, "since"))
    assert whose(store.release(KEYS, "b.2", ending("b")).granted) == digest("a")


@pytest.mark.core
def test_a_turn_and_the_time_to_the_next_double_with_each_that_was_lost(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    for lost in range(4):
        before = now_us(client)
        assert store.published(KEYS, digest("a"), TURN)
        due = int(client.hget(KEYS.lock, "due") or 0)
        assert due - before == pytest.approx(TURN * 1000 * 2**lost, abs=10 * SECOND)
        make_due(client)
        before = now_us(client)
        assert store.sweep(KEYS, "s.1", TURN, TRIES) == Taken()
        until = client.zscore(LATER, digest("a"))
        assert until
        assert until - before == pytest.approx(TURN * 1000 * 2**lost, abs=10 * SECOND)
        assert client.zscore(INDEX, NAME.text) == until
        make_ready(client, "a")
        assert whose(store.sweep(KEYS, "s.1", TURN, TRIES).granted) == digest("a")


@pytest.mark.core
def test_after_so_many_lost_turns_it_goes_to_the_dead_letters_with_its_entry_intact(
    store: RedisStore, client: redis.Redis
) -> None:
    grant_to(store, "a")
    for lost in range(1, 4):
        buried = lose_turn(store, client, "a", tries=3)
        assert buried == (digest("a") if lost == 3 else "")
        if lost < 3:
            make_ready(client, "a")
            store.sweep(KEYS, "s.1", TURN, 3)
    assert client.hgetall(KEYS.dead()) == {digest("a"): entry_of("a")}
    assert not client.exists(KEYS.lock, *KEYS.queue())


@pytest.mark.core
def test_a_late_copy_of_a_dead_letter_takes_its_entry_out_and_runs(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    assert lose_turn(store, client, "a", tries=1) == digest("a")
    take(store, "a.2", "a", copied=True, rank_us=10, turn="123")
    assert not client.exists(KEYS.dead())


@pytest.mark.core
def test_a_late_copy_of_a_dead_letter_that_has_to_wait_takes_its_entry_out_and_parks(
    store: RedisStore, client: redis.Redis
) -> None:
    grant_to(store, "a")
    assert lose_turn(store, client, "a", tries=1) == digest("a")
    take(store, "h.1", "h")
    park(store, "a.2", "a", copied=True, rank_us=10)
    assert not client.exists(KEYS.dead())
    assert waiting(client) == [digest("a")]


@pytest.mark.core
def test_parking_again_forgets_lost_turns(store: RedisStore, client: redis.Redis) -> None:
    """Its copy was late, not lost: slow rounds must not add up to a dead letter."""
    grant_to(store, "a")
    rank = int(client.hget(KEYS.lock, "rank") or 0)
    park(store, "b.1", "b")
    lose_turn(store, client, "a")
    park(store, "a.2", "a", copied=True, rank_us=rank)
    assert client.hgetall(PARKED) == {digest("a"): entry_of("a"), digest("b"): entry_of("b")}
    assert not client.exists(LATER)
    assert rank_in(client, "a") == rank


@pytest.mark.core
def test_a_grant_nobody_published_is_handed_out_again_and_counts_as_no_lost_turn(
    store: RedisStore, client: redis.Redis
) -> None:
    granted = grant_to(store, "a")
    for _ in range(3 * TRIES):
        assert store.sweep(KEYS, "s.1", TURN, TRIES) == Taken()
        make_due(client)
        assert store.sweep(KEYS, "s.1", TURN, TRIES) == Taken(granted=granted)
    assert client.hgetall(PARKED) == {digest("a"): entry_of("a")}


# Sweeps


@pytest.mark.core
def test_a_sweep_grants_a_lock_whose_lease_ended(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    assert store.due("dlock", [NAME.bucket], 10) == []
    expire(client)
    assert store.due("dlock", [NAME.bucket], 10) == [NAME]
    assert whose(store.sweep(KEYS, "s.1", TURN, TRIES).granted) == digest("a")
    assert store.due("dlock", [NAME.bucket], 10) == []


@pytest.mark.core
def test_a_sweep_comes_back_when_a_renewed_lease_would_end(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    client.zadd(INDEX, {NAME.text: 1})
    before = now_us(client)
    assert store.sweep(KEYS, "s.1", TURN, TRIES) == Taken()
    look = client.zscore(INDEX, NAME.text)
    assert look
    assert before < look <= now_us(client) + TTL * 1000
    assert store.release(KEYS, "h.1", Ending()).granted


def test_a_sweep_of_a_lock_nobody_waits_for_forgets_it(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    store.take_out(KEYS, digest("a"), "t.1")
    client.zadd(INDEX, {NAME.text: 1})
    assert store.sweep(KEYS, "s.1", TURN, TRIES) == Taken()
    assert not client.exists(INDEX)


def test_each_bucket_tells_of_its_own_locks_at_most_so_many(store: RedisStore, client: redis.Redis) -> None:
    names = [LockName(f"n:{number}", bucket) for bucket in (3, 4) for number in range(3)]
    for name in names:
        client.zadd(LockKeys.of("dlock", name).queue()[3], {name.text: 1})
    assert store.due("dlock", [3, 4, 5], 10) == names
    assert store.due("dlock", [4], 10) == names[3:]
    assert len(store.due("dlock", [3, 4], 2)) == 4


# Taking out


@pytest.mark.core
def test_a_waiter_that_is_taken_out_never_runs_and_never_blocks(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    park(store, "b.1", "b")
    assert store.take_out(KEYS, digest("a"), "t.1").entry == entry_of("a")
    assert waiting(client) == [digest("b")]
    assert isinstance(ask(store, "a.2", "a", redelivered=True), Duplicate)
    assert whose(store.release(KEYS, "h.1", ending("h")).granted) == digest("b")


@pytest.mark.core
def test_a_granted_one_that_is_taken_out_passes_its_turn_on(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b")
    taken = store.take_out(KEYS, digest("a"), "t.1")
    assert (taken.entry, whose(taken.granted)) == (entry_of("a"), digest("b"))
    assert client.hkeys(PARKED) == [digest("b")]


@pytest.mark.core
@pytest.mark.parametrize("bury", [False, True])
def test_one_that_runs_is_not_taken_out(store: RedisStore, client: redis.Redis, bury: bool) -> None:
    take(store, "a.1", "a")
    before = client.hgetall(KEYS.lock)
    assert store.take_out(KEYS, digest("a"), "t.1", bury=bury, ended=True) == Taken()
    assert client.hgetall(KEYS.lock) == before
    assert not client.exists(KEYS.done(digest("a")), KEYS.dead())


@pytest.mark.core
@pytest.mark.parametrize("ended", [False, True])
def test_taking_out_what_does_not_wait_marks_it_only_if_its_end_is_stored(
    store: RedisStore, client: redis.Redis, ended: bool
) -> None:
    assert store.take_out(KEYS, digest("a"), "t.1", ended=ended) == Taken()
    assert bool(client.exists(KEYS.done(digest("a")))) == ended


@pytest.mark.core
def test_who_is_buried_keeps_its_entry_and_may_still_run(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    assert store.take_out(KEYS, digest("a"), "t.1", bury=True).entry == entry_of("a")
    assert client.hgetall(KEYS.dead()) == {digest("a"): entry_of("a")}
    assert not client.exists(KEYS.done(digest("a")), *KEYS.queue()[:3])


# Limits


@pytest.mark.core
def test_where_the_limit_is_reached_nobody_parks_and_the_waiting_are_left(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    for who in "ab":
        park(store, f"{who}.1", who, limit=2)
    answer = ask(store, "c.1", "c", limit=2, parks=True)
    assert isinstance(answer, Queued)
    assert answer.waiting == 2
    assert waiting(client) == [digest("a"), digest("b")]
    assert park(store, "a.2", "a", limit=2, rank_us=rank_in(client, "a")).position == 1  # it waits already


@pytest.mark.core
def test_those_who_lost_a_turn_count_as_waiting_and_the_granted_one_does_not(
    store: RedisStore, client: redis.Redis
) -> None:
    grant_to(store, "a")
    park(store, "b.1", "b", limit=1)
    lose_turn(store, client, "a")
    assert isinstance(ask(store, "c.1", "c", limit=1, parks=True), Queued)
    assert park(store, "c.1", "c", limit=2)


@pytest.mark.core
def test_the_oldest_makes_room_for_the_newest(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    for who in "ab":
        park(store, f"{who}.1", who, limit=2, ousts=True)
    parked = park(store, "c.1", "c", limit=2, ousts=True)
    assert parked.ousted == Grant(digest("a"), entry_of("a"))
    assert parked.position == 2
    assert waiting(client) == [digest("b"), digest("c")]
    assert sorted(client.hkeys(PARKED)) == sorted([digest("b"), digest("c"), f"{digest('c')}:ousts"])


@pytest.mark.core
def test_a_newcomer_older_than_all_who_wait_is_itself_the_one_that_goes(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "b.1", "b", rank_us=20, limit=1, ousts=True)
    parked = park(store, "a.1", "a", rank_us=10, limit=1, ousts=True)
    assert parked.ousted == Grant(digest("a"), entry_of("a"))
    assert waiting(client) == [digest("b")]


# Who waits


@pytest.mark.core
def test_waiting_tells_how_many_wait_who_and_since_when(store: RedisStore, client: redis.Redis) -> None:
    grant_to(store, "a")
    rank = int(client.hget(KEYS.lock, "rank") or 0)
    for who, at in [("b", 2), ("c", 3), ("d", 4)]:
        park(store, f"{who}.1", who, rank_us=at * SECOND)
    found = store.waiting(KEYS, 3)
    assert found.count == 4
    assert found.waiters == (
        Waiter("app.post", "a", rank / 1e6), Waiter("app.post", "b", 2.0), Waiter("app.post", "c", 3.0)
    )  # fmt: skip
    lose_turn(store, client, "a")
    found = store.waiting(KEYS, 10)
    assert [waiter.task_id for waiter in found.waiters] == ["b", "a", "c", "d"]
    assert found.count == 4


# Entries nobody can read


@pytest.mark.core
@pytest.mark.parametrize(
    "first", ["", "no json", "[]", "{}", "5", "null", '["only a task"]', "[null, null]", "[5, 7]", '[[], {"a": 1}]', "[true]"]
)
def test_an_entry_that_cannot_be_read_has_its_turn_as_any_other(
    store: RedisStore, client: redis.Redis, first: str
) -> None:
    """Its publisher finds it so, and buries it; a script that fails at it would stop all who wait behind."""
    take(store, "h.1", "h")
    park(store, "a.1", "a", entry=f"{first}\nrest")
    park(store, "b.1", "b")
    granted = store.release(KEYS, "h.1", ending("h")).granted
    assert granted
    assert (granted.identity, granted.entry) == (digest("a"), f"{first}\nrest")
    assert store.inspect(KEYS)
    assert store.waiting(KEYS, 5).count == 2
    assert isinstance(store.acquire(KEYS, "l.1", TTL, plain_claim()), Held)
    assert whose(store.take_out(KEYS, digest("a"), "t.1", bury=True).granted) == digest("b")
    assert client.hgetall(KEYS.dead()) == {digest("a"): f"{first}\nrest"}


def test_a_waiter_whose_entry_was_lost_is_passed_over(store: RedisStore, client: redis.Redis) -> None:
    take(store, "h.1", "h")
    park(store, "a.1", "a")
    park(store, "b.1", "b")
    client.hdel(PARKED, digest("a"))
    assert whose(store.release(KEYS, "h.1", ending("h")).granted) == digest("b")


def test_a_name_that_redis_has_to_send_as_it_is(store: RedisStore, client: redis.Redis) -> None:
    odd: dict[str, Any] = {"entry": json.dumps(["tâche\n", "id\x00'\""]) + "\n{\"b\": \"\u2028\"}"}
    take(store, "h.1", "h")
    park(store, "a.1", "a", **odd)
    granted = store.release(KEYS, "h.1", ending("h")).granted
    assert granted
    assert granted.entry == odd["entry"]
    assert client.hget(KEYS.lock, "task") == "tâche\n"
