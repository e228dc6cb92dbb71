"""Seats in the store (``limit``): as many holders as the limit, each with a seat, a token and an expiry of its own."""

import random
from typing import Any

import pytest
import redis

from celery_dlock.keys.lock_name import LockName, shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, Duplicate, Held, Identity, Refusal, Renewal, Tombstoned
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import TTL, ending_of, request_of

LIMIT = 3
NAME = shared_name("gpu")._replace(seats=LIMIT)
LARGER = NAME._replace(seats=5)
KEYS = LockKeys.of("dlock", NAME)
FREED = ReleaseRequest()


def ask(
    store: RedisStore, acquisition: str, task_id: str | None = None, name: LockName = NAME, **facts: Any
) -> Acquired | Refusal:
    return store.acquire(name, acquisition, TTL, request_of(task_id, **facts))


def take(store: RedisStore, acquisition: str, task_id: str | None = None, name: LockName = NAME) -> Acquired:
    answer = ask(store, acquisition, task_id, name)
    assert isinstance(answer, Acquired), answer
    return answer


def fill(store: RedisStore, name: LockName = NAME) -> list[Acquired]:
    """Take every seat: owner o0 has seat 0, and so on."""
    return [take(store, f"o{seat}.1", f"t{seat}", name) for seat in range(name.seats)]


def seat_key(seat: int) -> str:
    return f"{KEYS.lock}:{seat}" if seat else KEYS.lock


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_calls_take_the_first_free_seat_until_all_are_held(store: RedisStore) -> None:
    assert [taken.seat for taken in fill(store)] == [0, 1, 2]
    refused = ask(store, "late.1", "late")
    assert isinstance(refused, Held)
    assert not refused.same_message
    assert store.release(NAME, "o1.1", ending_of("t1")).ours
    assert take(store, "late.2", "late").seat == 1


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_tokens_of_a_seat_grow_and_no_two_holders_have_the_same(store: RedisStore) -> None:
    tokens: dict[int, list[int]] = {}
    for turn in range(4):
        for taken in fill(store):
            tokens.setdefault(taken.seat, []).append(taken.token)
        for seat in range(LIMIT):
            store.release(NAME, f"o{seat}.1", ending_of(f"t{seat}", final=False))
        assert len({token for each in tokens.values() for token in each}) == LIMIT * (turn + 1)
    assert all(each == sorted(each) for each in tokens.values())


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_release_that_is_sent_twice_does_not_free_another_holders_seat(store: RedisStore) -> None:
    fill(store)
    store.release(NAME, "o1.1", ending_of("t1"))
    assert take(store, "next.1", "next").seat == 1
    assert not store.release(NAME, "o1.1", ending_of("t1")).ours
    assert isinstance(ask(store, "late.1", "late"), Held)


@pytest.mark.invariant("store-calls-are-idempotent")
@pytest.mark.core
def test_acquire_that_is_sent_twice_keeps_its_seat_and_token(store: RedisStore) -> None:
    first, second, _ = fill(store)
    store.release(NAME, "o0.1", ending_of("t0"))
    again = take(store, "o1.1", "t1")
    assert (again.token, again.seat) == (second.token, 1)
    assert first.seat == 0
    assert take(store, "next.1", "next").seat == 0


@pytest.mark.invariant("duplicates-do-not-run")
@pytest.mark.core
def test_duplicate_is_found_at_every_seat_also_above_the_limit_of_its_worker(store: RedisStore) -> None:
    fill(store, LARGER)
    store.release(LARGER, "o0.1", ending_of("t0"))
    answer = ask(store, "again.1", "t4", redelivered=True)
    assert isinstance(answer, Held)
    assert answer.same_message
    assert store.release(LARGER, "o4.1", ending_of("t4")).duplicate_seen
    assert isinstance(ask(store, "again.2", "t4", redelivered=True), Duplicate)


@pytest.mark.invariant("largest-limit-counts")
@pytest.mark.core
def test_worker_with_a_smaller_limit_uses_the_seats_of_the_larger_one(store: RedisStore) -> None:
    take(store, "large.1", "large", LARGER)
    seats = [take(store, f"small{number}.1", f"small{number}").seat for number in range(4)]
    assert seats == [1, 2, 3, 4]
    assert isinstance(ask(store, "late.1", "late"), Held)


@pytest.mark.invariant("largest-limit-counts")
@pytest.mark.core
def test_smaller_limit_counts_when_no_command_has_had_the_larger_one_for_a_minute(
    store: RedisStore, client: redis.Redis
) -> None:
    fill(store, LARGER)
    limit, seen, places = client.get(KEYS.named("seats")).split()  # type: ignore[union-attr]
    assert (limit, places) == ("5", "5")
    client.set(KEYS.named("seats"), f"{limit} {int(seen) - 61} {places}")
    store.release(NAME, "o0.1", ending_of("t0"))
    assert take(store, "next.1", "next").seat == 0
    store.release(NAME, "o3.1", ending_of("t3"))
    assert isinstance(ask(store, "late.1", "late"), Held)
    # Its duplicate is still found at the seat that is above the limit now.
    again = ask(store, "again.1", "t4")
    assert isinstance(again, Held)
    assert again.same_message
    store.release(NAME, "o4.1", ending_of("t4"))
    assert isinstance(ask(store, "late.2", "late"), Held)
    assert client.get(KEYS.named("seats")).split()[::2] == ["3", "3"]  # type: ignore[union-attr]


@pytest.mark.invariant("largest-limit-counts")
@pytest.mark.core
def test_renewal_by_a_worker_with_the_larger_limit_keeps_that_limit(store: RedisStore, client: redis.Redis) -> None:
    fill(store, LARGER)
    limit, seen, places = client.get(KEYS.named("seats")).split()  # type: ignore[union-attr]
    client.set(KEYS.named("seats"), f"{limit} {int(seen) - 61} {places}")
    assert store.renew([Renewal(LARGER, "o4.1", TTL)]) == [True]
    store.release(NAME, "o3.1", ending_of("t3"))
    assert take(store, "next.1", "next").seat == 3


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_lease_of_one_seat_expires_while_the_others_are_renewed(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    for seat in range(LIMIT):
        client.pexpire(seat_key(seat), 5000)
    assert store.renew([Renewal(NAME, f"o{seat}.1", TTL) for seat in (0, 2)]) == [True, True]
    assert client.pttl(seat_key(1)) <= 5000
    assert client.pttl(seat_key(2)) > 5000
    client.delete(seat_key(1))
    assert store.renew([Renewal(NAME, "o1.1", TTL), Renewal(NAME, "o2.1", TTL)]) == [False, True]
    assert take(store, "next.1", "next").seat == 1


@pytest.mark.invariant("store-calls-are-idempotent")
@pytest.mark.core
def test_acquisition_that_was_rolled_back_takes_no_seat_later(store: RedisStore) -> None:
    assert not store.release(NAME, "o.1", ReleaseRequest(outcome_unknown=True)).ours
    assert isinstance(ask(store, "o.1", "t"), Tombstoned)
    take(store, "o.2", "t")
    assert store.release(NAME, "o.2", ReleaseRequest(outcome_unknown=True)).ours
    assert store.inspect(NAME) is None


@pytest.mark.invariant("store-calls-are-idempotent")
@pytest.mark.core
def test_renewal_and_done_mark_that_are_sent_twice_change_one_seat_once(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    for seat in range(LIMIT):
        client.pexpire(seat_key(seat), 5000)
    assert store.renew([Renewal(NAME, "o2.1", TTL)] * 2) == [True, True]
    assert [client.pttl(seat_key(seat)) > 5000 for seat in range(LIMIT)] == [False, False, True]
    store.mark_done(NAME, Identity("t2").digest, "o2", 10**6)
    mark = client.get(KEYS.done(Identity("t2").digest))
    store.mark_done(NAME, Identity("t2").digest, "o2", 0)
    assert client.get(KEYS.done(Identity("t2").digest)) == mark


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_refusal_names_the_holder_that_is_about_to_release_its_seat(store: RedisStore) -> None:
    fill(store)
    assert store.renew([Renewal(NAME, "o2.1", TTL, (("releasing", "1"),))]) == [True]
    refused = ask(store, "late.1", "late")
    assert isinstance(refused, Held)
    assert (refused.holder.task_id, refused.holder.releasing) == ("t2", True)


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_refusal_names_the_holder_whose_lease_ends_first(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    client.pexpire(seat_key(1), 5000)
    refused = ask(store, "late.1", "late")
    assert isinstance(refused, Held)
    assert refused.holder.task_id == "t1"
    assert refused.holder.expires_in <= 5


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.core
@pytest.mark.parametrize("seat", range(LIMIT))
def test_release_of_any_seat_wakes_one_waiting_call(store: RedisStore, seat: int) -> None:
    fill(store)
    assert isinstance(ask(store, "w.1", "w", notify=True), Held)
    assert store.release(NAME, f"o{seat}.1", ending_of(f"t{seat}")).woke
    assert store.release_listener(NAME).wait(5)
    assert not store.release_listener(NAME).wait(0.02)


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.core
def test_call_that_was_woken_wakes_the_next_one_for_another_free_seat(store: RedisStore) -> None:
    fill(store)
    for waiter in ("v", "w"):
        assert isinstance(ask(store, f"{waiter}.1", waiter, notify=True), Held)
    for seat in (0, 2):
        store.release(NAME, f"o{seat}.1", ending_of(f"t{seat}"))  # no call listens yet: one wake-up for both
    assert store.release_listener(NAME).wait(5)
    assert not store.release_listener(NAME).wait(0.02)
    woken = ask(store, "v.2", "v", notify=True, waited=True)
    assert isinstance(woken, Acquired)
    assert store.release_listener(NAME).wait(5)


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.core
def test_call_that_was_woken_marks_the_seats_that_others_took_meanwhile(store: RedisStore) -> None:
    fill(store)
    for waiter in ("v", "w"):
        assert isinstance(ask(store, f"{waiter}.1", waiter, notify=True), Held)
    store.release(NAME, "o0.1", ending_of("t0"))
    assert store.release_listener(NAME).wait(5)
    take(store, "quick.1", "quick")  # it does not wait, and knows of no call that does
    store.release(NAME, "o1.1", ending_of("t1"))
    assert isinstance(ask(store, "v.2", "v", notify=True, waited=True), Acquired)
    assert store.release_listener(NAME).wait(5)  # the wake-up of o1's release
    assert store.release(NAME, "quick.1", ending_of("quick")).woke


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_retry_takes_the_seat_that_its_run_reserved(store: RedisStore) -> None:
    fill(store)
    retry = Identity("t1", 1)
    ending = ending_of("t1", reserved_for=retry.digest, reserved_ms=TTL)
    assert store.release(NAME, "o1.1", ending).ours
    assert isinstance(ask(store, "late.1", "late"), Held)
    taken = store.acquire(NAME, "retry.1", TTL, request_of("t1")._replace(identity=retry))
    assert isinstance(taken, Acquired)
    assert taken.seat == 1


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_done_mark_stops_a_late_duplicate_of_a_run_on_a_seat_above_zero(store: RedisStore) -> None:
    fill(store)
    store.mark_done(NAME, Identity("t2").digest, "o2", 0)
    assert store.release(NAME, "o2.1", ending_of("t2")).ours
    assert isinstance(ask(store, "again.1", "t2", redelivered=True), Duplicate)


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
def test_name_without_a_limit_runs_the_scripts_of_a_lock(store: RedisStore, client: redis.Redis) -> None:
    taken = take(store, "o.1", "t", NAME._replace(seats=1))
    assert taken.seat == 0
    store.release(NAME._replace(seats=1), "o.1", ending_of("t"))
    assert not client.exists(KEYS.named("seats"))


class History:
    """Calls come, end, die and are sent twice, in any order."""

    def __init__(self, store: RedisStore, client: redis.Redis, seed: int) -> None:
        self.store, self.client, self.chance = store, client, random.Random(seed)
        self.held: dict[str, tuple[str, Acquired]] = {}
        self.newest: dict[int, int] = {}
        self.number = 0

    def come(self) -> None:
        self.number += 1
        task_id = f"t{self.number}"
        answer = ask(self.store, f"{task_id}.1", task_id)
        if len(self.held) == LIMIT:
            assert isinstance(answer, Held)
            return
        assert isinstance(answer, Acquired)
        assert answer.seat not in {taken.seat for _, taken in self.held.values()}
        assert answer.token > self.newest.get(answer.seat, 0)
        self.newest[answer.seat] = answer.token
        self.held[f"{task_id}.1"] = task_id, answer

    def send_again(self, acquisition: str) -> None:
        task_id, taken = self.held[acquisition]
        again = ask(self.store, acquisition, task_id)
        assert isinstance(again, Acquired)
        assert (again.token, again.seat) == (taken.token, taken.seat)

    def die(self, acquisition: str) -> None:
        _, taken = self.held.pop(acquisition)
        self.client.delete(seat_key(taken.seat))
        assert self.store.renew([Renewal(NAME, acquisition, TTL)]) == [False]

    def end(self, acquisition: str) -> None:
        task_id, _ = self.held.pop(acquisition)
        assert self.store.release(NAME, acquisition, ending_of(task_id)).ours
        assert not self.store.release(NAME, acquisition, ending_of(task_id)).ours

    def step(self) -> None:
        if not self.held or self.chance.random() < 0.5:
            self.come()
            return
        step = self.chance.choice((self.send_again, self.die, self.end, self.end, self.end))
        step(self.chance.choice(sorted(self.held)))


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
@pytest.mark.parametrize("seed", range(8))
def test_random_histories_never_have_more_holders_than_seats(store: RedisStore, client: redis.Redis, seed: int) -> None:
    history = History(store, client, seed)
    for _ in range(120):
        history.step()
