"""What a worker says at its start of tasks that were meant to be singletons and are none: they run without a lock.

Told by a signal and not by a step of ours: that one belongs to workers which have a singleton task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from celery.signals import celeryd_after_setup

from ..options.lock_options import LockOptions
from ..utils.log import logger
from .base import SingletonTask

__all__ = ["warn_about_unlocked_tasks"]


#: Options that a plain task may well have for a purpose of its own.
_COMMON: Final = ("key", "scope", "ttl", "unique", "durability", "retry_delay", "retry_delay_max", "retry_limit")
_UNMISTAKABLE: Final = [name for name in LockOptions.names() if name not in _COMMON]


def warn_about_unlocked_tasks(instance: Any, **_facts: Any) -> None:
    """Log one warning for each such task of a worker's app."""
    for name, task in sorted(instance.app.tasks.items()):
        if isinstance(task, SingletonTask):
            continue
        if stray := [option for option in _UNMISTAKABLE if option in vars(type(task))]:
            logger.warning(
                "task %r has the lock options %s and runs without a lock: its base is no SingletonTask; "
                "write @singleton_task",
                name, ", ".join(stray),
            )  # fmt: skip
        elif isinstance(getattr(task, "lock_options", None), LockOptions):
            logger.warning(
                "task %r has lock_options and runs without a lock: its base is no SingletonTask; "
                "write @app.task(base=SingletonTask, lock_options=...), or @singleton_task",
                name,
            )
        elif (inner := next(filter(_is_singleton, _wrapped(task.run)), None)) is not None:
            logger.warning(
                "task %r calls the task %r, which takes no lock so: write @singleton_task alone, "
                "without another task decorator above it",
                name, inner.name,
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
