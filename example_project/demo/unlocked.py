"""A stand-in for celery_dlock that locks nothing, to prove that the demo sees what the locks prevent."""

import sys
from typing import Any

from celery import Celery, Task


def install() -> None:
    """Take the library's place. To be called before the shop is imported."""
    sys.modules["celery_dlock"] = sys.modules[__name__]


class Unlocked:
    """Lease and lock in one: nobody ever holds it, and nobody ever loses it."""

    token = None
    idempotency_key = ""

    def ensure(self) -> None: ...

    def holder(self) -> None: ...


class SingletonTask(Task):  # type: ignore[type-arg]  # generic for type checkers only
    lease = Unlocked()

    def lock_for(self, *_args: Any, **_kwargs: Any) -> Unlocked:
        return Unlocked()


def singleton_task(*, app: Celery, **options: Any) -> Any:
    """Celery keeps options it does not know as attributes of the task: the lock's own do no harm."""
    return app.task(base=SingletonTask, **options)
