"""``LockControl.ticks()``: whether the last ticks of the beat schedule ran."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.schedules import BaseSchedule

from celery_dlock import singleton_task
from celery_dlock.control import LockControl, TickView
from celery_dlock.keys.lock_name import name_from_text
from celery_dlock.messaging.tick_header import Tick
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import ending_of, request_of, take
from tests.contract.web_helpers import operators_url

HOUR = 3600.0


@pytest.fixture
def app(make_app: Callable[..., Celery], lock_url: str) -> Celery:
    """An app with tasks for ticks, and one without."""
    made = make_app(operators_url(lock_url))

    @singleton_task(app=made, name="shop.report", key="{shop}", once_per="tick")
    def report(shop: str) -> None: ...

    @singleton_task(app=made, name="shop.poll", once_per="tick", misfire_grace=30)
    def poll() -> None: ...

    @singleton_task(app=made, name="shop.sell")
    def sell() -> None: ...

    return made


def ticks(app: Celery, schedule: Any, task: str = "shop.report", args: tuple[str, ...] = ("berlin",)) -> list[TickView]:
    app.conf.beat_schedule = {"entry": {"task": task, "schedule": schedule, "args": args}}
    with LockControl(app) as control:
        return list(control.ticks())


def begin(store: RedisStore, tick: TickView) -> str:
    """Let a run of this tick begin. Return its digest."""
    digest = Tick(tick.entry, tick.due).digest
    take(store, "x.1", request_of("x", once=True, tick=digest), name=name_from_text(tick.name))
    return digest


def test_last_three_due_times_are_shown_the_newest_first(app: Celery) -> None:
    before = time.time()
    found = ticks(app, HOUR)
    dues = [tick.due for tick in found]
    assert dues == [dues[0], dues[0] - HOUR, dues[0] - 2 * HOUR]
    assert dues[0] % HOUR == 0
    assert before - HOUR < dues[0] <= time.time()
    assert {(tick.entry, tick.task, tick.state) for tick in found} == {("entry", "shop.report", "open")}
    assert found[0].name == app.tasks["shop.report"].lock_name("berlin")


@pytest.mark.parametrize("state", ["running", "used", "unknown"])
def test_run_of_a_tick_is_found_with_its_worker(app: Celery, store: RedisStore, state: str) -> None:
    tick = ticks(app, HOUR)[0]
    digest = begin(store, tick)
    if state == "used":
        store.release(name_from_text(tick.name), "x.1", ending_of("x", once=True, used_ms=60_000, tick=digest))
    elif state == "unknown":
        store.release(name_from_text(tick.name), "x.1", ReleaseRequest(outcome_unknown=True))
    found = next(one for one in ticks(app, HOUR) if one.due == tick.due)  # an hour may have begun
    assert (found.state, found.run and found.run.worker, found.run and found.run.task_id) == (state, "node1", "x")
    others = [one.state for one in ticks(app, HOUR) if one.due != tick.due]
    assert set(others) == {"open"}


def test_tick_without_a_run_is_missed_when_a_message_would_be_too_late(app: Celery) -> None:
    found = ticks(app, 60.0, "shop.poll", ())
    assert found[1].state == "missed"  # 60 to 120 s old, and misfire_grace is 30 s


def test_tick_whose_runs_are_not_remembered_is_past(app: Celery) -> None:
    assert ticks(app, 48 * HOUR)[1].state == "past"  # 48 to 96 h old; a run is remembered for a day


def test_entry_of_a_task_without_ticks_is_not_listed(app: Celery) -> None:
    assert ticks(app, HOUR, "shop.sell", ()) == []
    assert ticks(app, HOUR, "shop.unknown", ()) == []


class Odd(BaseSchedule):  # type: ignore[misc]  # Celery has no types
    """A schedule of a user, of which only Celery knows when it is due."""


@pytest.mark.parametrize(
    ("schedule", "args", "problem"),
    [
        (Odd(), ("berlin",), "only beat can tell"),
        (HOUR, (), "its call has no lock name"),
    ],
    ids=["other schedule", "wrong arguments"],
)
def test_entry_whose_ticks_are_not_known_says_why(
    app: Celery, schedule: Any, args: tuple[str, ...], problem: str
) -> None:
    (found,) = ticks(app, schedule, args=args)
    assert (found.state, problem in found.problem, found.due) == ("", True, 0.0)
