"""A run calls the hooks of its task's class around its body, and leaves out only Celery's empty ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from celery import Celery, Task

from celery_dlock import singleton_task

pytestmark = pytest.mark.core


def test_tracing_librarys_wrapper_of_celerys_own_hooks_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's own hooks are empty and are left out; a wrapper that has their names is not empty."""
    called: list[str] = []

    def traced(hook: Any) -> Any:
        @functools.wraps(hook)
        def wrapper(*args: Any) -> Any:
            called.append(hook.__name__)
            return hook(*args)

        return wrapper

    monkeypatch.setattr(Task, "before_start", traced(Task.before_start))
    monkeypatch.setattr(Task, "after_return", traced(Task.after_return))
    app = Celery("traced", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.dlock_url = "memory://"

    @singleton_task(app=app, name="traced.add")
    def add() -> int:
        return 5

    assert add.apply().get() == 5
    assert called == ["before_start", "after_return"]
