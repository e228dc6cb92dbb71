"""Checks of an app's tasks that need no lock store: a worker's start and Django's system checks share them.

A signal triggers the warnings at a worker's start. The worker step of this library would not: it runs only if the app
has a singleton task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from celery.signals import celeryd_after_setup

from ..errors import InvalidLockOptions
from ..messaging.results import has_backend
from ..options.durability import check_ttl
from ..options.lock_options import LockOptions
from ..utils.log import log_fields, logger
from .base import SingletonTask
from .definition_checks import check_features

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["check_task", "singleton_tasks", "unlocked_tasks", "warn_about_unlocked_tasks"]

#: Lock options that a plain task may have as attributes for another purpose.
_COMMON: Final = ("key", "scope", "ttl", "wait", "unique", "retry_delay", "retry_delay_max", "retry_limit")
_UNMISTAKABLE: Final = [name for name in LockOptions.names() if name not in _COMMON]


def singleton_tasks(app: Celery) -> list[SingletonTask]:
    """Return the app's tasks that take locks."""
    return [task for task in app.tasks.values() if isinstance(task, SingletonTask)]


def check_task(task: SingletonTask) -> None:
    """Check a task's key and options against the settings of its app.

    Raises:
        InvalidLockOptions: A setting, the task's key or one of its options is invalid.
        NoLockStore: No setting names a Redis for the locks.
    """
    task.lock_spec  # noqa: B018  # made, and checked, at its first use
    settings = task.dlock.settings  # read, and checked, at its first use
    check_features(task.app.conf.get("dlock_url"), task.lock_options, task.name)
    if task.lock_options.skips_with_result and has_backend(task):
        _refuse_unstorable(task)
    check_ttl(f"task {task.name!r}: ttl", settings.durability, task.lock_options.ttl_or(settings.ttl))


def unlocked_tasks(app: Celery) -> Iterator[tuple[str, str]]:
    """Yield the name of each task that has lock options but runs without a lock, and a text that says why."""
    for name, task in sorted(app.tasks.items()):
        if not isinstance(task, SingletonTask) and (reason := _unlocked(task)):
            yield name, f"Task {name} {reason}"


def _unlocked(task: Any) -> str:
    if stray := [option for option in _UNMISTAKABLE if option in vars(type(task))]:
        return (
            f"has the lock options {', '.join(stray)} but runs without a lock, because its base is not SingletonTask. "
            "Use @singleton_task"
        )
    if isinstance(getattr(task, "lock_options", None), LockOptions):
        return (
            "has lock_options but runs without a lock, because its base is not SingletonTask. "
            "Use @app.task(base=SingletonTask, lock_options=...), or @singleton_task"
        )
    inner = next((body for body in _wrapped(task.run) if isinstance(body, SingletonTask)), None)
    if inner is None:
        return ""
    return (
        f"calls the task {inner.name} directly, which takes no lock. Use @singleton_task alone, without "
        "another task decorator above it"
    )


def _wrapped(body: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while body is not None and id(body) not in seen:
        seen.add(id(body))
        yield body
        body = getattr(body, "__wrapped__", None)


def _refuse_unstorable(task: SingletonTask) -> None:
    value = task.lock_options.skip_result
    try:
        task.backend.encode(value)
    except Exception as error:
        expected = f"a value that result_serializer={task.app.conf.result_serializer!r} can store, but {error}"
        raise InvalidLockOptions(f"task {task.name!r}: invalid skip_result={value!r}: expected {expected}") from error


def warn_about_unlocked_tasks(instance: Any, **_facts: Any) -> None:
    """Log one warning for each task of a worker's app that has lock options but runs without a lock."""
    for name, text in unlocked_tasks(instance.app):
        logger.warning("%s", text, extra=log_fields(name))


celeryd_after_setup.connect(warn_about_unlocked_tasks)
