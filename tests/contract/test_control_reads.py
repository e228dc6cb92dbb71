"""The operator's view of each state of a lock name, over each topology, with an operator's rights only."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_dlock.control import LockControl, explanation
from celery_dlock.errors import InvalidLockOptions, LockKeyError
from celery_dlock.keys.lock_name import LockName, shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.model import Requester
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract import queue_helpers as queue
from tests.contract.helpers import TTL, ending_of, request_of, take
from tests.support.servers import LOCK_USER, OPERATOR_USER, Server

WINDOW = 60_000


def name(text: str) -> LockName:
    return shared_name(text)


def hold(store: RedisStore, text: str, **facts: Any) -> None:
    take(store, f"{text}.1", request_of(text, **facts), name=name(text))


def grant(store: RedisStore, text: str, *more: str) -> None:
    queue.take(store, "first.1", "first", name(text))
    for task_id in (text, *more):
        queue.park(store, f"{task_id}.1", task_id, name(text))
    store.release(name(text), "first.1", queue.ending("first"))


def use(store: RedisStore, text: str) -> None:
    hold(store, text, once=True)
    ending = ending_of(text, once=True, used_ms=WINDOW, window_ms=WINDOW, seed="1")
    store.release(name(text), f"{text}.1", ending)


def die(store: RedisStore, text: str) -> None:
    hold(store, text, once=True)
    store.release(name(text), f"{text}.1", ReleaseRequest(outcome_unknown=True))


def claim(store: RedisStore, text: str) -> None:
    by = Requester("app.post", text, "web1", "7")
    assert store.claim([(name(text), ClaimRequest(text, 0, WINDOW, False, by, "attempt"))]) == [None]


def bury(store: RedisStore, text: str) -> None:
    queue.take(store, f"{text}h.1", f"{text}h", name(text))
    queue.park(store, f"{text}.1", text, name(text))
    store.remove_waiter(name(text), queue.digest(text), "s.1", dead_letter=True)


def every_state(store: RedisStore) -> dict[str, str]:
    """Return the state of each lock name."""
    hold(store, "h")
    grant(store, "g")
    hold(store, "k", min_hold_ms=WINDOW)
    store.release(name("k"), "k.1", ReleaseRequest())
    use(store, "u")
    die(store, "d")
    claim(store, "c")
    states = {"h": "held", "g": "granted", "k": "kept", "u": "used", "d": "unknown", "c": "claimed"}
    return {name(text).text: state for text, state in states.items()}


@pytest.mark.invariant("operators-see-each-state")
@pytest.mark.core
def test_list_shows_a_name_in_each_of_the_six_states(store: RedisStore, control: LockControl) -> None:
    expected = every_state(store)
    page = control.locks()
    assert {view.name: view.states for view in page.items} == {text: (state,) for text, state in expected.items()}
    assert len(page.items) == 6
    assert page.cursor == ""


@pytest.mark.parametrize("state", ["held", "granted", "kept", "used", "unknown", "claimed"])
def test_list_of_one_state_shows_that_name_only(store: RedisStore, control: LockControl, state: Any) -> None:
    expected = {text for text, its in every_state(store).items() if its == state}
    assert {view.name for view in control.locks(state=state).items} == expected


def test_lock_shows_the_same_state_with_its_facts(store: RedisStore, control: LockControl) -> None:
    for text, state in every_state(store).items():
        assert control.lock(text).states == (state,)
    held = control.lock(name("h").text).holder
    assert held is not None
    assert (held.acquisition, held.task, held.task_id, held.worker, held.pid) == ("h.1", "app.post", "h", "node1", 77)
    assert held.fresh
    assert (held.ttl, held.token > 0) == (TTL / 1000, True)
    kept, granted = control.lock(name("k").text).holder, control.lock(name("g").text).holder
    assert kept is not None
    assert granted is not None
    assert (kept.kept_by, kept.fresh, granted.task_id, granted.worker) == ("min_hold", False, "g", "")
    claimed = control.lock(name("c").text).claim
    assert claimed is not None
    assert (claimed.task_id, claimed.publisher) == ("c", "web1")


def test_free_name_has_no_states_and_a_malformed_one_is_refused(control: LockControl) -> None:
    assert control.lock(name("free").text).states == ()
    with pytest.raises(LockKeyError, match="32 hexadecimal digits"):
        control.lock("app.post")
    with pytest.raises(InvalidLockOptions, match="'kept'"):
        control.locks(state="open")  # type: ignore[arg-type]


def test_name_in_several_states_is_listed_once_with_all_of_them(store: RedisStore, control: LockControl) -> None:
    use(store, "x")
    claim(store, "x")
    (view,) = control.locks().items
    assert view.states == ("used", "claimed")
    hold(store, "y", once=True)
    (view,) = control.locks(name=name("y").text).items
    assert (view.states, view.run and view.run.state) == (("held",), "running")


def test_tick_has_an_entry_of_its_own(store: RedisStore, control: LockControl) -> None:
    tick = "0123456789abcdef" * 2
    take(store, "x.1", request_of("x", once=True, tick=tick), name=name("x"))
    ending = ending_of("x", once=True, used_ms=WINDOW, window_ms=WINDOW, seed="1", tick=tick)
    store.release(name("x"), "x.1", ending)
    (view,) = control.locks().items
    assert (view.name, view.states, view.run and view.run.tick) == (name("x").text, ("used",), tick)


@pytest.mark.core
def test_lists_of_indexes_go_on_behind_a_place_in_any_topology(store: RedisStore, control: LockControl) -> None:
    for number in range(30):
        bury(store, f"d{number}")
        die(store, f"u{number}")
        grant(store, f"q{number}")
    dead, unknown, waiting = control.dead_letters().items, control.unknown_outcomes().items, control.queues().items
    assert (len(dead), len(unknown), len(waiting)) == (30, 30, 30)
    assert [queue.count for queue in waiting] == [1] * 30
    lists = (control.dead_letters, dead), (control.unknown_outcomes, unknown), (control.queues, waiting)
    for ask, expected in lists:
        for size in (1, 12, 29):
            page = ask(limit=size)
            rest = ask(cursor=page.cursor)
            assert [one.name for one in (*page.items, *rest.items)] == [one.name for one in expected]
            assert (len(page.items), rest.cursor) == (size, "")
        assert ask(limit=30).cursor == ""


@pytest.mark.core
def test_pages_show_each_name_once_whatever_their_size(store: RedisStore, control: LockControl) -> None:
    for number in range(120):
        hold(store, f"n{number}")
    for limit in (1, 7, 1000):
        page, seen = control.locks(limit=limit), []
        while True:
            assert len(page.items) <= max(limit, 20) * 3
            seen += [view.name for view in page.items]
            if not page.cursor:
                break
            page = control.locks(limit=limit, cursor=page.cursor)
        assert sorted(seen) == sorted(name(f"n{number}").text for number in range(120))
    assert control.locks().keys >= 120


@pytest.mark.parametrize("cursor", ["x", "WyJhIl0=", "WyJub3doZXJlOjEiLCAiMCJd"])
def test_cursor_of_another_store_is_refused(control: LockControl, cursor: str) -> None:
    with pytest.raises(ValueError, match="invalid cursor"):
        control.locks(cursor=cursor)


def test_list_filters_by_task_name_and_age(store: RedisStore, control: LockControl) -> None:
    hold(store, "x")
    other = Requester("other", "o", "node1", "7")
    take(store, "o.1", request_of("o")._replace(requester=other), name=name("o"))
    assert [view.name for view in control.locks(task="other").items] == [name("o").text]
    assert [view.name for view in control.locks(name="x:*").items] == [name("x").text]
    assert control.locks(older_than=60).items == []
    assert len(control.locks(older_than=-60).items) == 2


@pytest.mark.core
def test_unknown_outcomes_are_listed_until_they_are_settled(store: RedisStore, control: LockControl) -> None:
    for text in ("a", "b", "c"):
        die(store, text)
    use(store, "u")
    hold(store, "r", once=True)
    assert {run.task_id for run in control.unknown_outcomes().items} == {"a", "b", "c"}
    (run,) = control.unknown_outcomes(name("a").text).items
    last = store.last_run(name("a"))
    assert last is not None
    assert (run.worker, run.idempotency_key) == ("node1", last.idempotency_key)
    assert store.resolve_run(name("a"), sent=True, window_ms=WINDOW)
    assert store.forget_run(name("b"))
    assert [run.task_id for run in control.unknown_outcomes().items] == ["c"]


def test_run_that_died_with_its_worker_is_listed_when_its_lease_has_expired(
    store: RedisStore, client: Any, control: LockControl
) -> None:
    hold(store, "a", once=True)
    assert control.unknown_outcomes().items == ()
    client.delete(LockKeys.of("dlock", name("a")).lock)  # as after its ttl
    assert [run.task_id for run in control.unknown_outcomes().items] == ["a"]


def test_stale_entries_of_the_indexes_are_dropped(store: RedisStore, client: Any, control: LockControl) -> None:
    die(store, "a")
    bury(store, "b")
    run, letter = LockKeys.of("dlock", name("a")), LockKeys.of("dlock", name("b"))
    client.delete(run.run())
    client.delete(letter.named("dead"))
    assert (client.zcard(run.named("unsettled")), client.zcard(letter.named("dead_letters"))) == (1, 1)
    assert (control.unknown_outcomes().items, control.dead_letters().items) == ((), ())
    assert (client.zcard(run.named("unsettled")), client.zcard(letter.named("dead_letters"))) == (0, 0)


@pytest.mark.core
def test_dead_letters_and_waiters_are_listed_without_their_arguments(store: RedisStore, control: LockControl) -> None:
    bury(store, "a")
    grant(store, "g", "w")
    (letter,) = control.dead_letters().items
    assert (letter.name, letter.task, letter.task_id) == (name("a").text, "app.post", "a")
    assert abs(letter.since - time.time()) < 60
    assert [(one.task_id, one.state, one.position) for one in control.waiting(name("g").text)] == [
        ("g", "granted", 1),
        ("w", "waiting", 2),
    ]
    assert {one.identity for one in control.waiting()} == {queue.digest("g"), queue.digest("w")}
    assert len(control.waiting(limit=1)) == 1


def test_more_members_than_one_script_returns_are_all_listed(store: RedisStore, control: LockControl) -> None:
    queue.take(store, "h.1", "h", name("x"))
    for number in range(230):
        queue.park(store, f"{number}.1", str(number), name("x"))
        store.remove_waiter(name("x"), queue.digest(str(number)), "s.1", dead_letter=True)
    assert {letter.task_id for letter in control.dead_letters().items} == {str(number) for number in range(230)}
    page = control.dead_letters(limit=100)
    found = [*page.items]
    while page.cursor:
        page = control.dead_letters(limit=100, cursor=page.cursor)
        found += page.items
    assert sorted(letter.task_id for letter in found) == sorted(str(number) for number in range(230))


@pytest.mark.core
def test_explain_says_where_a_call_is(store: RedisStore, control: LockControl) -> None:
    every_state(store)
    bury(store, "b")
    queue.take(store, "h2.1", "h2", name("q"))
    queue.park(store, "w2.1", "w2", name("q"))
    texts = {text: " ".join(control.explain(text).lines) for text in ("h", "g", "d", "c", "b", "other")}
    assert texts["h"].startswith(f"it holds {name('h')} since ")
    assert "it is granted" in texts["g"]
    assert "its outcome is unknown" in texts["d"]
    assert f"claims {name('c')}" in texts["c"]
    assert "it is a dead letter" in texts["b"]
    assert texts["other"].startswith("nothing is known about it: it has no stored result, and no lock in the store")
    assert "celery -A APP inspect query_task other" in texts["other"]
    assert "dlock show --task TASK --args ARGS then shows its lock" in texts["other"]
    assert "a worker must start it by then" in texts["g"]
    held = f"{name('q').text} is now held: app.post[h2] on node1 (process 77) since"
    assert held in " ".join(control.explain("w2").lines)
    assert not control.explain("other").found


@pytest.mark.core
def test_explain_of_a_waiter_whose_lock_is_free_names_the_condition(
    store: RedisStore, control: LockControl, client: Any
) -> None:
    """Without a worker the waiter does not start, so no promise of seconds is made."""
    queue.take(store, "h3.1", "h3", name("q"))
    queue.park(store, "w3.1", "w3", name("q"))
    client.delete(LockKeys.of("dlock", name("q")).lock)
    assert f"{name('q').text} is free now" in " ".join(control.explain("w3").lines)
    assert "if any worker runs" in " ".join(control.explain("w3").lines)


@pytest.mark.core
def test_explain_answers_from_the_store_although_the_result_backend_hangs(
    store: RedisStore, make_app: Callable[..., Celery], lock_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(store, "x.1", request_of("x"))
    monkeypatch.setattr(explanation, "RESULT_TIMEOUT", 0.5)
    app = make_app(lock_url.replace(f"{LOCK_USER}:", f"{OPERATOR_USER}:"))
    with Server(tmp_path / "results") as results, LockControl(app) as control:
        app.conf.result_backend = results.url()
        results.pause()
        first, second = control.explain("x").lines
        results.resume()
    assert first == "the result backend did not answer within 0.5 s"
    assert second.startswith("it holds ")


def test_counts_are_those_of_the_store(store: RedisStore, control: LockControl) -> None:
    every_state(store)
    grant(store, "g2", "w")
    bury(store, "b")
    counts = control.counts()
    assert counts.locks == {"app.post": 5}
    assert (counts.waiting, counts.dead_letters) == ({"app.post": 3}, {"app.post": 1})
    assert (counts.unknown_outcomes, counts.claims) == ({"app.post": 1}, {"app.post": 1})
    assert set(counts.oldest_hold) == {"app.post"}


@pytest.mark.core
def test_health_of_a_store_that_answers(control: LockControl, topology: str) -> None:
    health = control.health()
    assert (health.up, health.error, health.eviction) == (True, "", "noeviction")
    assert len(health.clock_offsets) == (3 if topology == "cluster" else 1)
    assert all(abs(offset) < 5 for offset in health.clock_offsets.values())


def test_health_of_a_store_that_is_away_says_why(make_app: Callable[..., Celery]) -> None:
    health = LockControl(make_app("redis://127.0.0.1:1/0")).health()
    assert (health.up, "did not answer" in health.error) == (False, True)


def test_redlock_is_refused_with_the_reason(make_app: Callable[..., Celery]) -> None:
    with pytest.raises(InvalidLockOptions, match="cannot show the locks of a Redlock as a whole"):
        LockControl(make_app([f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]))
