"""The scripts under ``on_conflict="replace"`` on a real server: the newest call waits, and the running one stops."""

import time

import pytest
import redis

from celery_dlock.store import model
from celery_dlock.store.model import Acquired, Duplicate, Grant, Parked, Queued, Renewal, Replace, StopRequest
from celery_dlock.store.redis.store import RedisStore
from tests.contract.queue_helpers import (
    INDEX,
    KEYS,
    LATER,
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
    take,
    waiting,
)

pytestmark = [pytest.mark.core, pytest.mark.invariant("newest-call-stops-the-running-one")]

#: ``replace_max`` in milliseconds.
LAST = 20_000
FIRST, RETRY, IN_PLACE = Replace(LAST), Replace(LAST, model.RETRY), Replace(LAST, model.IN_PLACE)


def start(store: RedisStore, task_id: str, **facts: object) -> Acquired:
    return take(store, f"{task_id}.1", task_id, replace=FIRST, **facts)


def call(store: RedisStore, task_id: str, number: int = 2, **facts: object) -> Parked:
    return park(store, f"{task_id}.{number}", task_id, **{"replace": FIRST, **facts})


def start_granted(store: RedisStore, granted: Grant | None, task_id: str, **facts: object) -> object:
    """The copy that was published for the grant asks for the lock."""
    assert granted is not None
    assert granted.identity == digest(task_id)
    store.confirm_publish(NAME, granted.identity, TURN)
    grant = {"grant_id": granted.grant_id, "republished": True, **facts}
    return ask(store, f"{task_id}.9", task_id, entry=entry_of(task_id), **{"replace": FIRST, **grant})


def release(store: RedisStore, task_id: str, how: str = "stopped", number: int = 1) -> Grant | None:
    return store.release(NAME, f"{task_id}.{number}", ending(task_id, replace=how)).granted


def renewed(store: RedisStore, task_id: str, number: int = 1) -> object:
    (answer,) = store.renew([Renewal(NAME, f"{task_id}.{number}", 60_000, stoppable=True)])
    return answer


def replaced_by(answer: object, task_id: str) -> str:
    """Return the id of the call that replaced the caller itself."""
    assert isinstance(answer, Parked), answer
    assert answer.evicted is not None, answer
    assert answer.evicted.identity == digest(task_id)
    return answer.newer


def test_newer_call_waits_and_the_holder_learns_of_it_at_its_renewal(store: RedisStore) -> None:
    start(store, "a")
    assert renewed(store, "a") is True
    assert isinstance(ask(store, "b.2", "b", replace=FIRST), Queued)
    assert renewed(store, "a") is True
    assert call(store, "b").evicted is None
    assert renewed(store, "a") == StopRequest("b")
    assert isinstance(start_granted(store, release(store, "a"), "b"), Acquired)
    assert renewed(store, "b", 9) is True


def test_second_newer_call_replaces_the_waiter_and_asks_no_second_time(store: RedisStore, client: redis.Redis) -> None:
    start(store, "a")
    call(store, "b")
    parked = call(store, "c")
    assert parked.evicted == Grant(digest("b"), entry_of("b"))
    assert parked.newer == "c"
    assert renewed(store, "a") == StopRequest("b")
    assert client.hget(KEYS.named("replaced"), f"stop:{digest('a')}") in ("b", b"b")
    assert len(waiting(client)) == 1
    store.remove_waiter(NAME, digest("b"), "g.1", ended=True)
    assert isinstance(ask(store, "b.5", "b", redelivered=True, replace=FIRST), Duplicate)
    assert isinstance(start_granted(store, release(store, "a"), "c"), Acquired)


def test_command_sent_twice_gives_the_same_reply(store: RedisStore) -> None:
    start(store, "a")
    call(store, "b")
    assert call(store, "c") == call(store, "c")


def test_plain_renewal_and_a_holder_of_another_policy_learn_nothing(store: RedisStore) -> None:
    take(store, "h.1", "h")
    call(store, "b")
    assert renewed(store, "h") is True
    assert release(store, "h", "") is not None


def test_stop_waits_for_min_hold(store: RedisStore) -> None:
    start(store, "a", min_hold_ms=600)
    call(store, "b")
    assert renewed(store, "a") is True
    time.sleep(0.7)
    assert renewed(store, "a") == StopRequest("b")


def test_redelivery_of_a_stopped_holder_whose_process_died_never_runs(store: RedisStore, client: redis.Redis) -> None:
    start(store, "a")
    call(store, "b")
    expire(client)
    granted = store.sweep(NAME, "s.1", TURN, TRIES).granted
    assert replaced_by(call(store, "a", 5, redelivered=True), "a") == "b"
    store.remove_waiter(NAME, digest("a"), "g.1", ended=True)
    assert isinstance(start_granted(store, granted, "b"), Acquired)
    assert isinstance(ask(store, "a.6", "a", redelivered=True, replace=FIRST), Duplicate)
    assert not client.hexists(KEYS.named("replaced"), f"stop:{digest('a')}")


def test_release_of_a_stopped_holder_sets_its_done_mark(store: RedisStore) -> None:
    start(store, "a")
    call(store, "b")
    release(store, "a")
    assert isinstance(ask(store, "a.5", "a", redelivered=True, replace=FIRST), Duplicate)


def test_stopped_holder_that_requeues_its_message_ends_at_the_redelivery(store: RedisStore) -> None:
    start(store, "a")
    call(store, "b")
    store.release(NAME, "a.1", ending("a", final=False, replace="ended"))
    assert replaced_by(call(store, "a", 5, redelivered=True), "a") == "b"


def test_older_call_than_the_waiter_replaces_nothing(store: RedisStore) -> None:
    start(store, "a", rank_us=10)
    call(store, "c", rank_us=30)
    assert replaced_by(call(store, "b", rank_us=20), "b") == "c"
    assert call(store, "b", rank_us=20).evicted is not None  # sent twice
    assert isinstance(start_granted(store, release(store, "a"), "c"), Acquired)


def test_older_call_than_the_last_one_that_started_replaces_nothing(store: RedisStore) -> None:
    start(store, "b", rank_us=20)
    assert replaced_by(call(store, "a", rank_us=10), "a") == "b"
    assert renewed(store, "b") is True


def test_redelivered_call_whose_body_died_runs_again(store: RedisStore, client: redis.Redis) -> None:
    start(store, "a", rank_us=20)
    client.delete(KEYS.lock)
    assert take(store, "a.5", "a", replace=FIRST, rank_us=10, redelivered=True).token


def test_granted_call_is_not_evicted_but_ends_itself_when_a_newer_one_waits(store: RedisStore) -> None:
    start(store, "a")
    call(store, "b")
    granted = release(store, "a")
    assert call(store, "c").evicted is None
    answer = start_granted(store, granted, "b")
    assert replaced_by(answer, "b") == "c"
    assert isinstance(answer, Parked)
    assert isinstance(start_granted(store, answer.granted, "c"), Acquired)


def test_replaced_call_whose_end_was_not_stored_is_granted_and_ends_itself(
    store: RedisStore, client: redis.Redis
) -> None:
    """The process that replaced it died before it stored the end."""
    start(store, "a")
    call(store, "b")
    call(store, "c")
    granted = release(store, "a")
    assert isinstance(start_granted(store, granted, "c"), Acquired)
    make_ready(client, "b")
    answer = start_granted(store, release(store, "c", number=9), "b")
    assert replaced_by(answer, "b") == "c"


def wind_back(client: redis.Redis, ms: int) -> None:
    since = int(client.hget(KEYS.named("replaced"), "busy_since") or 0)
    client.hset(KEYS.named("replaced"), "busy_since", str(since - ms * 1000))


def test_running_call_is_left_alone_after_replace_max(store: RedisStore, client: redis.Redis) -> None:
    start(store, "a")
    wind_back(client, LAST)
    call(store, "b")
    assert renewed(store, "a") is True
    granted = release(store, "a", "ended")
    assert isinstance(start_granted(store, granted, "b"), Acquired)
    call(store, "c")
    assert renewed(store, "b", 9) == StopRequest("c")


def test_granted_call_starts_after_replace_max_although_a_newer_one_waits(
    store: RedisStore, client: redis.Redis
) -> None:
    start(store, "a")
    call(store, "b")
    granted = release(store, "a")
    wind_back(client, LAST)
    call(store, "c")
    assert isinstance(start_granted(store, granted, "b"), Acquired)
    assert renewed(store, "b", 9) is True


def test_granted_calls_that_give_way_count_for_replace_max(store: RedisStore, client: redis.Redis) -> None:
    """Calls that come faster than a granted copy would else keep every body from its start."""
    start(store, "a")
    call(store, "b")
    granted = release(store, "a", "ended")
    call(store, "c")
    answer = start_granted(store, granted, "b")
    assert replaced_by(answer, "b") == "c"
    assert client.hexists(KEYS.named("replaced"), "busy_since")
    wind_back(client, LAST)
    call(store, "d")
    assert isinstance(answer, Parked)
    assert isinstance(start_granted(store, answer.granted, "c"), Acquired)
    assert renewed(store, "c", 9) is True


def test_time_without_calls_does_not_count_for_replace_max(store: RedisStore, client: redis.Redis) -> None:
    start(store, "a")
    assert release(store, "a", "ended") is None
    start(store, "b")
    wind_back(client, LAST)
    assert release(store, "b") is None
    start(store, "c")
    call(store, "d")
    assert renewed(store, "c") == StopRequest("d")


def test_retry_is_as_old_as_its_first_run(store: RedisStore) -> None:
    start(store, "a", rank_us=10)
    release(store, "a", "ended")
    take(store, "a2.1", "a", replace=RETRY, rank_us=30)
    assert call(store, "b", rank_us=20).evicted is None
    assert renewed(store, "a2") == StopRequest("b")


def test_waiting_retry_is_replaced_by_a_call_that_is_newer_than_its_first_run(store: RedisStore) -> None:
    start(store, "a", rank_us=10, min_hold_ms=60_000)
    release(store, "a", "ended")
    call(store, "a", replace=RETRY, rank_us=30)
    parked = call(store, "b", rank_us=20)
    assert (parked.evicted and parked.evicted.identity, parked.newer) == (digest("a"), "b")


def test_retry_of_a_call_after_which_another_one_started_replaces_nothing(store: RedisStore) -> None:
    start(store, "a")
    release(store, "a", "ended")
    start(store, "b")
    assert replaced_by(call(store, "a", 5, replace=RETRY), "a") == "b"
    assert renewed(store, "b") is True


def test_retry_under_another_name_ends_if_a_call_of_that_name_has_started(store: RedisStore) -> None:
    """The store cannot know that this call's first run, under its first name, began later."""
    start(store, "b")
    release(store, "b", "ended")
    assert replaced_by(call(store, "a", replace=RETRY), "a") == "b"


def test_call_in_the_place_of_another_task_runs_although_older_ones_ran(store: RedisStore) -> None:
    """Another task has replaced itself by this call (``self.replace``), and never had this lock."""
    start(store, "b")
    release(store, "b", "ended")
    assert take(store, "a.1", "a", replace=IN_PLACE).token
    release(store, "a", "ended")
    start(store, "c")
    assert replaced_by(call(store, "a", 5, replace=RETRY), "a") == "c"


def test_call_in_its_own_place_is_as_old_as_its_first_run(store: RedisStore) -> None:
    start(store, "a", rank_us=10, min_hold_ms=60_000)
    release(store, "a", "ended")
    call(store, "b", rank_us=20)
    assert replaced_by(call(store, "a", replace=IN_PLACE, rank_us=30), "a") == "b"


def test_start_in_the_future_counts_no_more(store: RedisStore, client: redis.Redis) -> None:
    """The server's clock went back."""
    start(store, "b")
    release(store, "b", "ended")
    client.hset(KEYS.named("replaced"), "started_rank", str(10**18))
    assert start(store, "a").token


def test_free_lock_with_a_waiter_is_granted_to_the_newer_call(store: RedisStore, client: redis.Redis) -> None:
    start(store, "a")
    call(store, "b")
    client.delete(KEYS.lock)
    parked = call(store, "c")
    assert parked.evicted == Grant(digest("b"), entry_of("b"))
    assert isinstance(start_granted(store, parked.granted, "c"), Acquired)


def test_store_keeps_nothing_of_a_call_that_ended_but_its_record(store: RedisStore, client: redis.Redis) -> None:
    start(store, "a")
    call(store, "b")
    call(store, "c")
    store.remove_waiter(NAME, digest("b"), "g.1", ended=True)
    start_granted(store, release(store, "a"), "c")
    release(store, "c", "ended", number=9)
    assert not client.exists(PARKED, LATER, KEYS.lock, KEYS.named("dead"), INDEX)
    assert 0 < client.pttl(KEYS.named("replaced")) <= 24 * 3600 * 1000 + LAST
    fields = client.hkeys(KEYS.named("replaced"))
    assert not [field for field in fields if b"stop" in (field if isinstance(field, bytes) else field.encode())]
