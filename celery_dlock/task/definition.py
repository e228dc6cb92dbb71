"""Steps of defining a task class: bases, lock options, warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InvalidLockOptions
from ..options.lock_options import LockOptions
from ..options.overrides import overridden
from ..utils.log import log_fields, logger

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["apply_decorator_options", "inherit_app_task", "warn_of_lost_calls"]


def inherit_app_task(app: Celery, cls: type) -> None:
    """Add the app's task class to the bases of a task class that a decorator made from a function.

    Celery takes ``app.Task`` if the decorator names no base. The decorator cannot do this: a shared task is made once
    for each app, and the app is known only then. A Django project's class brings ``delay_on_commit``.
    """
    inherited = [base for base in cls.__bases__ if not issubclass(app.Task, base)]
    if not issubclass(cls, app.Task):
        cls.__bases__ = (*inherited, app.Task)


def apply_decorator_options(cls: Any) -> None:
    """Override the inherited ``lock_options`` with the keywords of ``@singleton_task``.

    The decorator cannot do this: the app's task class may be a singleton with options of its own, and is known only
    after :func:`inherit_app_task`.

    Raises:
        InvalidLockOptions: The combined options contradict each other.
    """
    chosen = vars(cls).get("dlock_chosen")
    try:
        if chosen:
            cls.lock_options = overridden(cls.lock_options, chosen)
    except InvalidLockOptions as error:
        raise InvalidLockOptions(f"task {cls.name!r}: {error}") from None


def warn_of_lost_calls(name: str, options: LockOptions) -> None:
    """Log a warning if calls are published that the policy then skips."""
    if options.loses_published_calls:
        logger.warning(
            "Task %s: unique='queued' publishes a call while the first one runs, and on_conflict=%r then skips it. "
            "Set on_conflict='retry' or 'queue', or unique='queued+running'",
            name, options.on_conflict, extra=log_fields(name),
        )  # fmt: skip
