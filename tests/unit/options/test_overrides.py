"""A decorator's keywords override the fields of its base's ``lock_options`` one by one."""

import logging
from typing import Any

import pytest
from celery import Celery

from celery_dlock import InvalidLockOptions, LockOptions, SingletonTask, singleton_task
from celery_dlock.options.overrides import overridden

pytestmark = pytest.mark.core


class Waiting(SingletonTask):
    lock_options = LockOptions(
        ttl=5, on_conflict="queue", queue_limit=3, wait=2, key=["n"], once_per=60, on_used="raise"
    )


def body(n: int) -> None: ...


def lock_options(**options: Any) -> LockOptions:
    task = singleton_task(app=Celery("here", set_as_current=False), name="t", base=Waiting, **options)(body)
    chosen: LockOptions = task.lock_options
    return chosen


def test_keyword_of_decorator_leaves_the_other_options_of_its_base() -> None:
    assert lock_options(ttl=9) == LockOptions(**{**vars(Waiting.lock_options), "ttl": 9})


def test_keyword_of_decorator_drops_options_of_its_base_that_lose_their_meaning() -> None:
    chosen = lock_options(on_conflict="retry", once_per=None)
    assert (chosen.on_conflict, chosen.ttl, chosen.key) == ("retry", 5, ("n",))
    assert (chosen.queue_limit, chosen.on_used, chosen.wait) == (None, "skip", 2)


def test_keyword_of_decorator_that_does_not_fit_its_base_is_refused() -> None:
    with pytest.raises(InvalidLockOptions, match="task 't': invalid stop='ask': it needs on_conflict='replace'"):
        lock_options(stop="ask")


def test_base_whose_lock_options_are_no_lock_options_is_refused() -> None:
    class Wrong(SingletonTask):
        lock_options: Any = 3

    with pytest.raises(InvalidLockOptions, match=r"task 't': invalid base=.*lock_options=3"):
        singleton_task(app=Celery("here", set_as_current=False), name="t", base=Wrong, ttl=4)(body)


def warnings_of(caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        singleton_task(app=Celery("here", set_as_current=False), name="t", lazy=False, **options)(body)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("policy", [{}, {"wait": 2}])
def test_unique_task_that_skips_published_calls_warns_at_definition(
    policy: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = warnings_of(caplog, unique="queued", **policy)
    assert warning.startswith("Task t: unique='queued' publishes a call while the first one runs")
    assert f"on_conflict={policy.get('on_conflict', 'skip')!r} then skips it" in warning


@pytest.mark.parametrize(
    "options", [{"unique": "queued", "on_conflict": "retry"}, {"unique": "queued+running"}, {"on_conflict": "skip"}]
)
def test_unique_task_that_keeps_published_calls_warns_of_nothing(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(caplog, **options) == []


@pytest.mark.parametrize("chosen", [{"stop": "ask"}, {"on_conflict": "skip"}])
def test_override_resets_the_seconds_of_a_kill_that_it_leaves_without_effect(chosen: dict[str, str]) -> None:
    made = overridden(LockOptions(on_conflict="replace", stop=5), chosen)
    assert (made.stop, made.kill_after) == (chosen.get("stop", "raise"), None)


def test_shared_task_overrides_the_options_of_its_base() -> None:
    singleton_task(name="shared.t", base=Waiting, ttl=9)(body)
    task: Any = Celery("here", set_as_current=False).tasks["shared.t"]
    assert (task.lock_options.ttl, task.lock_options.on_conflict) == (9, "queue")
