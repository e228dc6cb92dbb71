"""Options that ``limit`` and ``on_conflict="replace"`` refuse: the error names the task, the value and the remedy."""

from typing import Any

import pytest
from celery import Celery

from celery_dlock import InvalidLockOptions, singleton_task
from celery_dlock.task.call_options import call_of, headers_for

REDLOCK = ["redis://lock-1", "redis://lock-2", "redis://lock-3"]
REPLACE = "task 'shop.bill': invalid on_conflict='replace': expected another policy with "
SEVERAL = "several servers (Redlock) in dlock_url"
OTHERS = "one server, sentinels, a Cluster or PostgreSQL or MySQL or memory:// in dlock_url"
POLICIES = f"'skip', 'retry' or 'raise', or {OTHERS}"
REMOVE = "Remove one of the two"


def define(dlock_url: Any = "redis://lock-1", **options: Any) -> Any:
    app = Celery("refusals", broker="memory://", set_as_current=False)
    app.conf.dlock_url = dlock_url
    app.conf.task_default_queue = "refusals"  # all apps of a process share kombu's queues in memory

    @singleton_task(app=app, shared=False, name="shop.bill", **options)
    def bill(number: int) -> int:
        return number

    app.finalize()
    return bill


def refusal(**options: Any) -> str:
    with pytest.raises(InvalidLockOptions) as refused:
        define(**options)
    return str(refused.value)


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"on_conflict": "replace"},
            "on_conflict='replace', because it leaves one call to run; use another policy",
        ),
        (
            {"on_conflict": "queue", "debounce": 5},
            "debounce, because it leaves one call to run; remove one of the two",
        ),
        (
            {"once_per": 60},
            "once_per, because a name has one run mark and not one for each seat; remove one of the two",
        ),
        (
            {"once_per": "tick"},
            "once_per, because a name has one run mark and not one for each seat; remove one of the two",
        ),
        (
            {"unique": "queued+running"},
            "unique='queued+running', because it lets one call run; use unique='queued'",
        ),
    ],
)
def test_limit_is_refused_beside_another_option_with_the_remedy(options: dict[str, Any], reason: str) -> None:
    assert refusal(limit=3, **options) == f"task 'shop.bill': invalid limit=3: expected 1 with {reason}"
    assert define(limit=1, **options).lock_options.limit == 1


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"once_per": 60}, "once_per, because a stopped body has not succeeded, and its name must not stay used"),
        (
            {"once_per": 60, "after_crash": "hold"},
            "once_per, because a stopped body has not succeeded, and its name must not stay used",
        ),
        (
            {"keep_on_retry": True},
            "keep_on_retry, because the newest call must not wait for the retry of an older one",
        ),
        ({"unique": "queued"}, "unique, because unique keeps the first call and replace the last one"),
    ],
)
def test_replace_is_refused_beside_another_option_with_the_remedy(options: dict[str, Any], reason: str) -> None:
    assert refusal(on_conflict="replace", **options) == f"{REPLACE}{reason}. {REMOVE}"
    assert define(on_conflict="retry", **options).lock_options.on_conflict == "retry"


def test_replace_with_after_crash_alone_is_refused_with_what_after_crash_needs() -> None:
    expected = "task 'shop.bill': invalid after_crash='hold': it needs once_per"
    assert refusal(on_conflict="replace", after_crash="hold") == expected


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"limit": 3},
            f"invalid limit=3: {SEVERAL} have no seats; expected 1, or {OTHERS}",
        ),
        (
            {"on_conflict": "replace"},
            f"invalid on_conflict='replace': {SEVERAL} keep no order of waiters; expected {POLICIES}",
        ),
    ],
)
def test_limit_and_replace_are_refused_on_redlock_with_the_remedy(options: dict[str, Any], expected: str) -> None:
    assert refusal(dlock_url=REDLOCK, **options) == f"task 'shop.bill': {expected}"
    assert define(**options)


def test_call_that_chooses_replace_on_redlock_is_refused_and_not_published() -> None:
    task = define(dlock_url=REDLOCK)
    task.app.conf.dlock_call_options = "all"
    with pytest.raises(InvalidLockOptions, match=r"task 'shop\.bill': invalid on_conflict='replace': several servers"):
        task.apply_async((1,), dlock={"on_conflict": "replace"})
    with task.app.connection_for_read() as connection, connection.SimpleQueue("refusals") as queue:
        assert queue.qsize() == 0


def test_message_that_chooses_replace_is_refused_by_a_worker_on_redlock() -> None:
    """Its publisher's app has one server in ``dlock_url``."""
    publisher, worker = define(), define(dlock_url=REDLOCK)
    publisher.app.conf.dlock_call_options = worker.app.conf.dlock_call_options = "all"
    headers = headers_for(publisher, {"on_conflict": "replace"}, None)
    with pytest.raises(InvalidLockOptions, match=r"task 'shop\.bill': invalid on_conflict='replace': several servers"):
        call_of(worker, headers)


def test_call_that_chooses_a_limit_is_refused_with_the_tasks_own() -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        define().apply_async((1,), dlock={"limit": 3})
    expected = "expected the task's own (1), or dlock_call_options that lists 'limit'"
    assert str(refused.value) == f"task 'shop.bill': dlock: invalid limit=3 in a message: {expected}"
