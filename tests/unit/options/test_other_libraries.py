"""An unknown option gets the same help wherever it is written, also one of celery-once or celery-singleton."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_dlock import InvalidLockOptions, LockOptions, SingletonTask, singleton_task
from celery_dlock.options.other_libraries import UNMISTAKABLE

pytestmark = pytest.mark.core

APP = Celery("unknown", broker="memory://", set_as_current=False)


@singleton_task(app=APP, name="unknown.given")
def given(n: int) -> None: ...


def body(n: int) -> None: ...


def by_decorator(option: str) -> Any:
    return singleton_task(app=APP, name="unknown.new", **{option: 1})(body)


def by_lock_options(option: str) -> Any:
    return LockOptions(**{option: 1})


def by_call(option: str) -> Any:
    return given.apply_async((1,), dlock={option: 1})


def beside_dlock(option: str) -> Any:
    return given.apply_async((1,), **{option: 1})


def in_a_signature(option: str) -> Any:
    return given.s(1).set(**{option: 1}).apply_async()


def by_base(option: str) -> Any:
    return APP.task(base=SingletonTask, name="unknown.based", lazy=False, **{option: 1})(body)


EVERYWHERE = [by_decorator, by_lock_options, by_call]
BESIDE = [beside_dlock, in_a_signature, by_base]
FOREIGN = {
    "unique_on": r"use key=\[\.\.\.\] with unique='queued\+running'",
    "once": r"use unique='queued\+running'",
    "raise_on_duplicate": "use on_duplicate='raise' with unique=",
    "lock_expiry": "remove it, because the lock of a running task is renewed; set max_hold .*, or queued_ttl",
    "unlock_before_run": "use unique='queued' with on_conflict='retry'",
    "timeout": "remove it, because the lock of a running task is renewed; set max_hold .*, or queued_ttl",
    "lock_timeout": "remove it, because the lock of a running task is renewed; set max_hold .*, or queued_ttl",
    "blocking_timeout": "use wait=<seconds>",
}


@pytest.mark.parametrize("path", EVERYWHERE)
@pytest.mark.parametrize(("option", "meant"), FOREIGN.items())
def test_option_of_another_library_is_answered_with_its_equivalent(
    path: Callable[[str], Any], option: str, meant: str
) -> None:
    with pytest.raises(InvalidLockOptions, match=rf"unknown option '{option}' \(of another library: {meant}"):
        path(option)


@pytest.mark.parametrize("path", BESIDE)
@pytest.mark.parametrize("option", UNMISTAKABLE)
def test_option_of_another_library_is_refused_where_celery_takes_any_keyword(
    path: Callable[[str], Any], option: str
) -> None:
    with pytest.raises(InvalidLockOptions, match=rf"unknown option '{option}' \(of another library: "):
        path(option)


@pytest.mark.parametrize("path", EVERYWHERE)
def test_removed_option_is_answered_with_what_replaces_it(path: Callable[[str], Any]) -> None:
    with pytest.raises(
        InvalidLockOptions,
        match=r"unknown option 'after_lost' \(removed: use Celery's autoretry_for=\(LockLost,\)\); all options: ",
    ):
        path("after_lost")


@pytest.mark.parametrize("path", EVERYWHERE)
def test_misspelt_option_is_answered_with_the_one_that_was_meant(path: Callable[[str], Any]) -> None:
    with pytest.raises(
        InvalidLockOptions, match=r"unknown option 'on_conflct' \(did you mean 'on_conflict'\?\); all options: "
    ):
        path("on_conflct")


@pytest.mark.parametrize("name", ["lease", "waiting", "lock_for", "dlock", "resolve"])
def test_task_class_with_a_reserved_name_is_refused(name: str) -> None:
    class Mixin:
        pass

    setattr(Mixin, name, 1)
    task = type("Reserved", (Mixin, SingletonTask), {"name": "unknown.reserved", "run": body})
    with pytest.raises(InvalidLockOptions, match=rf"task 'unknown\.reserved': the attribute {name!r} is reserved"):
        task()
