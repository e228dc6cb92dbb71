"""A stub of celery_dlock that locks nothing, to prove that the demo detects what the locks prevent."""

import sys
from typing import Any

from celery import Celery, Task


def install() -> None:
    """Replace the library. Call this before the shop is imported."""
    sys.modules["celery_dlock"] = sys.modules[__name__]


class Unlocked:
    """A lease and lock that is never held and never lost."""

    token = None
    idempotency_key = ""

    def ensure(self) -> None: ...

    def holder(self) -> None: ...


class SingletonTask(Task):  # type: ignore[type-arg]  # generic for type checkers only
    lease = Unlocked()

    def lock_for(self, *_args: Any, **_kwargs: Any) -> Unlocked:
        return Unlocked()


def singleton_task(*, app: Celery, **options: Any) -> Any:
    """Define a plain task. Celery keeps the lock options as attributes, which have no effect."""
    return app.task(base=SingletonTask, **options)
