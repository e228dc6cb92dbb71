"""The queue that the seats of a name share (``limit`` with ``on_conflict="queue"``)."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_dlock.keys.lock_name import shared_name
from celery_dlock.store.model import Acquired, Duplicate, Grant, Held, Parked
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract.queue_helpers import TRIES, TURN, ask, digest, ending, now_us, park, take

LIMIT = 3
NAME = shared_name("gpu")._replace(seats=LIMIT)
LARGER = NAME._replace(seats=5)
UNKNOWN = NAME._replace(seats=0)
KEYS = LockKeys.of("dlock", NAME)
INDEX = KEYS.queue()[3]


def seat_key(seat: int) -> str:
    return f"{KEYS.lock}:{seat}" if seat else KEYS.lock


def fill(store: RedisStore, name: object = NAME) -> None:
    for seat in range(LIMIT if name is NAME else 5):
        assert take(store, f"o{seat}.1", f"t{seat}", name).seat == seat  # type: ignore[arg-type]


def sweep(store: RedisStore, number: int = 1) -> Grant | None:
    return store.sweep(UNKNOWN, f"sweeper.{number}", TURN, TRIES).granted


def start(store: RedisStore, grant: Grant | None, task_id: str) -> int:
    """Publish the grant's message, and take the seat. Return the seat."""
    assert grant is not None
    assert grant.identity == digest(task_id)
    assert store.confirm_publish(NAME, grant.identity, TURN)
    return take(store, f"{task_id}.9", task_id, NAME, grant_id=grant.grant_id).seat


def due_in(client: redis.Redis) -> float:
    score = client.zscore(INDEX, KEYS.name)
    assert score is not None
    return (score - now_us(client)) / 1e6


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
@pytest.mark.parametrize("seat", range(LIMIT))
def test_release_of_any_seat_grants_that_seat_to_the_first_waiter(store: RedisStore, seat: int) -> None:
    fill(store)
    assert park(store, "a.1", "a", NAME).position == 1
    assert park(store, "b.1", "b", NAME).position == 2
    granted = store.release(NAME, f"o{seat}.1", ending(f"t{seat}")).granted
    assert start(store, granted, "a") == seat
    assert store.list_waiters(NAME, 10).count == 1


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
def test_releases_of_all_seats_grant_the_waiters_in_their_order(store: RedisStore) -> None:
    fill(store)
    for task_id in "abcd":
        park(store, f"{task_id}.1", task_id, NAME)
    grants = [store.release(NAME, f"o{seat}.1", ending(f"t{seat}")).granted for seat in (2, 0, 1)]
    assert [start(store, grant, task_id) for grant, task_id in zip(grants, "abc", strict=True)] == [2, 0, 1]
    assert isinstance(ask(store, "late.1", "late", NAME, parks=True), Parked)
    assert store.list_waiters(NAME, 10).count == 2


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
def test_waiting_message_that_is_delivered_twice_takes_no_seat(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    park(store, "a.1", "a", NAME)
    client.delete(seat_key(1))
    # The seat is free, and the message is first in line. Only the copy that is published for its grant may run.
    again = park(store, "a.2", "a", NAME)
    assert start(store, again.granted, "a") == 1


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
def test_sweep_grants_a_seat_whose_lease_has_expired(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    park(store, "a.1", "a", NAME)
    assert sweep(store) is None
    client.delete(seat_key(2))
    assert start(store, sweep(store, 2), "a") == 2


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
def test_sweep_is_due_when_the_first_of_the_leases_ends(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    client.pexpire(seat_key(1), 4000)
    park(store, "a.1", "a", NAME)
    assert 3 < due_in(client) <= 4
    assert sweep(store) is None
    assert 3 < due_in(client) <= 4
    assert store.list_due_queues([NAME.bucket], 10, 5.0) == [UNKNOWN]


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
def test_start_on_one_seat_keeps_the_sweep_that_another_seats_grant_needs(
    store: RedisStore, client: redis.Redis
) -> None:
    fill(store)
    for task_id in "ab":
        park(store, f"{task_id}.1", task_id, NAME)
    grants = [store.release(NAME, f"o{seat}.1", ending(f"t{seat}")).granted for seat in (0, 1)]
    assert start(store, grants[0], "a") == 0
    # The releasing process may have died before it published the message of b.
    assert 0 < due_in(client) <= 5


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
def test_every_expired_seat_is_granted_by_the_sweeps_that_follow(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    for task_id in "abcd":
        park(store, f"{task_id}.1", task_id, NAME)
    for seat in range(LIMIT):
        client.delete(seat_key(seat))
    grants = [sweep(store, number) for number in range(4)]
    assert [grant and grant.identity for grant in grants] == [*map(digest, "abc"), None]
    assert [start(store, grant, task_id) for grant, task_id in zip(grants, "abc", strict=False)] == [0, 1, 2]


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
def test_call_of_a_larger_limit_gets_the_new_seats_granted(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    for task_id in "abc":
        park(store, f"{task_id}.1", task_id, NAME)
    parked = park(store, "large.1", "large", LARGER)
    assert [client.exists(seat_key(seat)) for seat in (3, 4)] == [1, 1]
    # One of the two new seats is granted by the reply, the other one is published by a sweep.
    swept = sweep(store)
    granted = {grant.identity for grant in (parked.granted, swept) if grant}
    assert granted == {digest("a"), digest("b")}
    assert store.list_waiters(LARGER, 10).count == 4
    assert sweep(store, 2) is None


@pytest.mark.invariant("seats-share-a-queue", "largest-limit-counts")
@pytest.mark.core
def test_seat_above_the_limit_is_granted_to_no_waiter(store: RedisStore, client: redis.Redis) -> None:
    fill(store, LARGER)
    limit, seen, places = client.get(KEYS.named("seats")).split()  # type: ignore[union-attr]
    client.set(KEYS.named("seats"), f"{int(limit)} {int(seen) - 61} {int(places)}")
    park(store, "a.1", "a", NAME)
    assert store.release(NAME, "o4.1", ending("t4")).granted is None
    assert sweep(store) is None
    assert start(store, store.release(NAME, "o0.1", ending("t0")).granted, "a") == 0


@pytest.mark.invariant("queue-calls-are-idempotent")
@pytest.mark.core
def test_commands_that_are_sent_twice_name_the_same_grant(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    for task_id in "ab":
        park(store, f"{task_id}.1", task_id, NAME)
    first = store.release(NAME, "o1.1", ending("t1")).granted
    assert store.release(NAME, "o1.1", ending("t1")).granted == first
    client.delete(seat_key(2))
    second = sweep(store)
    assert sweep(store) == second
    assert second is not None
    assert second.identity == digest("b")


@pytest.mark.invariant("queue-calls-are-idempotent")
@pytest.mark.core
def test_parking_that_is_sent_twice_names_the_grant_of_the_first_copy(store: RedisStore, client: redis.Redis) -> None:
    fill(store)
    park(store, "a.1", "a", NAME)
    client.delete(seat_key(1))
    first = park(store, "b.1", "b", NAME)
    assert first.granted is not None
    assert first.granted.identity == digest("a")
    client.pexpire(seat_key(2), 1000)  # else a refusal would look at the granted seat, whose time ends first
    assert park(store, "b.1", "b", NAME).granted == first.granted


@pytest.mark.invariant("queue-calls-are-idempotent")
@pytest.mark.core
def test_parking_sent_twice_names_its_grant_although_its_message_was_granted_too(
    store: RedisStore, client: redis.Redis
) -> None:
    """The first copy grants two free seats: one to b, by its reply, and one to a, by the next sweep."""
    fill(store)
    park(store, "b.1", "b", NAME, rank_us=100)
    for seat in (1, 2):
        client.delete(seat_key(seat))
    first = park(store, "a.1", "a", NAME, rank_us=200)
    assert first.granted is not None
    assert first.granted.identity == digest("b")
    assert client.hget(seat_key(2), "acq") == f"grant:{digest('a')}"
    assert park(store, "a.1", "a", NAME, rank_us=200).granted == first.granted
    assert store.confirm_publish(NAME, digest("b"), TURN)
    assert park(store, "a.1", "a", NAME, rank_us=200).granted is None


@pytest.mark.invariant("queue-calls-are-idempotent")
@pytest.mark.core
def test_sweep_sent_twice_names_its_grant_although_another_seat_became_free(
    store: RedisStore, client: redis.Redis
) -> None:
    fill(store)
    for task_id in "ab":
        park(store, f"{task_id}.1", task_id, NAME)
    client.delete(seat_key(2))
    first = sweep(store)
    assert first is not None
    assert first.identity == digest("a")
    client.delete(seat_key(0))
    assert sweep(store) == first
    assert start(store, sweep(store, 2), "b") == 0


@pytest.mark.invariant("queue-calls-are-idempotent")
@pytest.mark.core
def test_steps_of_a_grant_that_are_sent_twice_have_the_same_reply_and_effect(
    store: RedisStore, client: redis.Redis
) -> None:
    fill(store)
    for task_id in "abc":
        park(store, f"{task_id}.1", task_id, NAME)
    granted = store.release(NAME, "o1.1", ending("t1")).granted
    assert granted is not None
    for foreign in (True, True, False, False):
        assert store.decline_grant(NAME, granted, foreign=foreign)
    assert client.hget(seat_key(1), "foreign") is None
    removed = [store.remove_waiter(NAME, granted.identity, "remover.1") for _ in range(2)]
    assert removed[0] == removed[1]
    assert removed[0].granted is not None
    assert removed[0].granted.identity == digest("b")
    assert [store.confirm_publish(NAME, digest("b"), TURN) for _ in range(2)] == [True, True]
    assert [client.hget(seat_key(seat), "acq") for seat in range(LIMIT)] == ["o0.1", f"grant:{digest('b')}", "o2.1"]
    assert store.list_waiters(NAME, 10).count == 2


@pytest.mark.invariant("duplicates-do-not-run", "seats-share-a-queue")
@pytest.mark.core
def test_duplicate_of_a_running_message_is_not_parked(store: RedisStore) -> None:
    fill(store)
    again = ask(store, "again.1", "t2", NAME, parks=True, redelivered=True)
    assert isinstance(again, Held)
    assert again.same_message
    store.release(NAME, "o2.1", ending("t2"))
    assert isinstance(ask(store, "again.2", "t2", NAME, parks=True, redelivered=True), Duplicate)


@pytest.mark.invariant("failed-grants-pass-on", "seats-share-a-queue")
@pytest.mark.core
@pytest.mark.parametrize("seat", range(LIMIT))
def test_grant_that_no_worker_takes_goes_to_the_next_waiter(store: RedisStore, client: redis.Redis, seat: int) -> None:
    fill(store)
    for task_id in "ab":
        park(store, f"{task_id}.1", task_id, NAME)
    granted = store.release(NAME, f"o{seat}.1", ending(f"t{seat}")).granted
    assert granted is not None
    assert store.confirm_publish(NAME, granted.identity, TURN)
    client.hset(seat_key(seat), "due", str(now_us(client) - 1))
    assert start(store, sweep(store), "b") == seat


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
def test_removed_waiter_passes_its_seat_on(store: RedisStore) -> None:
    fill(store)
    for task_id in "ab":
        park(store, f"{task_id}.1", task_id, NAME)
    assert store.release(NAME, "o2.1", ending("t2")).granted
    removed = store.remove_waiter(NAME, digest("a"), "remover.1", ended=True)
    assert start(store, removed.granted, "b") == 2


class History:
    """Calls arrive and end, leases expire, grants are published in any order, and releases are sent twice."""

    def __init__(self, store: RedisStore, client: redis.Redis, seed: int) -> None:
        self.store, self.client, self.chance = store, client, random.Random(seed)
        #: Acquisition and seat of each task that runs.
        self.running: dict[str, tuple[str, int]] = {}
        self.started: list[str] = []
        self.grants: list[Grant] = []
        self.arrived = self.sweeps = 0

    def _hear(self, task_id: str, acquisition: str, answer: object) -> None:
        if isinstance(answer, Acquired):
            assert answer.seat not in {seat for _, seat in self.running.values()}
            self.running[task_id] = acquisition, answer.seat
            self.started.append(task_id)
        elif isinstance(answer, Parked) and answer.granted:
            self.grants.append(answer.granted)

    def arrive(self) -> None:
        self.arrived += 1
        task_id = f"t{self.arrived}"
        self._hear(task_id, f"{task_id}.1", ask(self.store, f"{task_id}.1", task_id, NAME, parks=True))

    def publish(self) -> None:
        grant = self.grants.pop(self.chance.randrange(len(self.grants)))
        _, task_id = json.loads(grant.entry.partition("\n")[0])
        self.store.confirm_publish(NAME, grant.identity, TURN)
        acquisition = f"{task_id}.{self.chance.randrange(2, 10**6)}"
        answer = ask(self.store, acquisition, task_id, NAME, parks=True, grant_id=grant.grant_id)
        self._hear(task_id, acquisition, answer)

    def end(self) -> None:
        task_id = self.chance.choice(sorted(self.running))
        acquisition, seat = self.running.pop(task_id)
        if self.chance.random() < 0.1:
            self.client.delete(seat_key(seat))  # it died
            return
        released = self.store.release(NAME, acquisition, ending(task_id))
        assert released.ours
        if released.granted:
            self.grants.append(released.granted)
            assert self.store.release(NAME, acquisition, ending(task_id)).granted == released.granted

    def sweep(self) -> None:
        """Sweep until nothing is left to do. Then no seat is idle while a call waits."""
        while granted := self.store.sweep(UNKNOWN, f"sweeper.{self.sweeps}", TURN, TRIES).granted:
            self.sweeps += 1
            if granted not in self.grants:
                self.grants.append(granted)
        self.sweeps += 1
        held = sum(self.client.exists(seat_key(seat)) for seat in range(LIMIT))
        assert held == LIMIT or not self.client.zcard(KEYS.queue()[0])


class Grants(list[Grant]):
    """The grants that are to be published, each once, however many replies name it."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[Grant] = set()

    def append(self, grant: Grant) -> None:
        if grant not in self._seen:
            self._seen.add(grant)
            super().append(grant)


class SentAgain:
    """A store that runs one of the last commands of some verb once more, when other commands have run in between.

    If a message has started, its earlier commands are not sent again: their copies would find a tombstone.
    """

    def __init__(self, store: RedisStore, seed: int) -> None:
        self._store, self._chance = store, random.Random(seed)
        #: The last commands of each verb.
        self._last: dict[str, list[tuple[Any, ...]]] = {}
        self.grants = Grants()

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return lambda *args: self._send(verb, args)

    def _send(self, verb: str, args: tuple[Any, ...]) -> Any:
        answer = getattr(self._store, verb)(*args)
        last = self._last.setdefault(verb, [])
        if isinstance(answer, Acquired):
            last[:] = [other for other in last if other[3].identity != args[3].identity]
        else:
            last[:] = [*last[-3:], args]
        if last and self._chance.random() < 0.5:
            self._again(self._chance.choice([verb for verb, sent in self._last.items() if sent]))
        return answer

    def _again(self, verb: str) -> None:
        answer = getattr(self._store, verb)(*self._chance.choice(self._last[verb]))
        assert not isinstance(answer, Acquired)
        if granted := getattr(answer, "granted", None):
            self.grants.append(granted)


@pytest.mark.invariant("seats-share-a-queue")
@pytest.mark.core
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_leave_no_seat_idle_while_a_call_waits(
    store: RedisStore, client: redis.Redis, seed: int
) -> None:
    run_to_end(History(store, client, seed))


@pytest.mark.invariant("queue-calls-are-idempotent", "seats-share-a-queue")
@pytest.mark.core
@pytest.mark.parametrize("seed", [5, 18, 28])  # they fail if a parked message may ask for a second seat
def test_commands_that_arrive_twice_and_late_start_each_call_once(
    store: RedisStore, client: redis.Redis, seed: int
) -> None:
    again = SentAgain(store, seed)
    history = History(again, client, seed)  # type: ignore[arg-type]  # it has the verbs of a store
    history.grants = again.grants
    run_to_end(history)


def run_to_end(history: History) -> None:
    for step in range(200):
        roll = history.chance.random()
        if roll < 0.45 and step < 150:
            history.arrive()
        elif roll < 0.6 and history.grants:
            history.publish()
        elif history.running:
            history.end()
        history.sweep()
    while history.grants or history.running:
        if history.grants:
            history.publish()
        if history.running:
            history.end()
        history.sweep()
    assert sorted(history.started) == sorted(f"t{number}" for number in range(1, history.arrived + 1))
