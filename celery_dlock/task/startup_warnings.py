"""Warnings at a worker's start about tasks that have lock options but run without a lock.

A signal triggers them. The worker step of this library would not: it runs only if the app has a singleton task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from celery.signals import celeryd_after_setup

from ..options.lock_options import LockOptions
from ..utils.log import log_fields, logger
from .base import SingletonTask

__all__ = ["warn_about_unlocked_tasks"]


#: Lock options that a plain task may have as attributes for another purpose.
_COMMON: Final = ("key", "scope", "ttl", "unique", "durability", "retry_delay", "retry_delay_max", "retry_limit")
_UNMISTAKABLE: Final = [name for name in LockOptions.names() if name not in _COMMON]


def warn_about_unlocked_tasks(instance: Any, **_facts: Any) -> None:
    """Log one warning for each task of a worker's app that has lock options but runs without a lock."""
    for name, task in sorted(instance.app.tasks.items()):
        if isinstance(task, SingletonTask):
            continue
        if stray := [option for option in _UNMISTAKABLE if option in vars(type(task))]:
            logger.warning(
                "Task %s has the lock options %s but runs without a lock, because its base is not SingletonTask. "
                "Use @singleton_task",
                name, ", ".join(stray), extra=log_fields(name),
            )  # fmt: skip
        elif isinstance(getattr(task, "lock_options", None), LockOptions):
            logger.warning(
                "Task %s has lock_options but runs without a lock, because its base is not SingletonTask. "
                "Use @app.task(base=SingletonTask, lock_options=...), or @singleton_task",
                name,
                extra=log_fields(name),
            )
        elif (inner := next(filter(_is_singleton, _wrapped(task.run)), None)) is not None:
            logger.warning(
                "Task %s calls the task %s directly, which takes no lock. Use @singleton_task alone, without "
                "another task decorator above it",
                name, inner.name, extra=log_fields(name),
            )  # fmt: skip


def _is_singleton(body: Any) -> bool:
    return isinstance(body, SingletonTask)


def _wrapped(body: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while body is not None and id(body) not in seen:
        seen.add(id(body))
        yield body
        body = getattr(body, "__wrapped__", None)


celeryd_after_setup.connect(warn_about_unlocked_tasks)
