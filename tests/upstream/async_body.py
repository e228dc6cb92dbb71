"""Celery: a task with an `async def` body succeeds without running."""

from __future__ import annotations

from typing import Any

from celery import Celery


def fault() -> str:
    app = Celery("async", set_as_current=False)
    ran = []

    @app.task
    async def body() -> None:
        ran.append(True)

    ended: Any = body.apply()
    if ended.state != "SUCCESS" or ran:
        return ""
    ended.result.close()
    return "SUCCESS, and the body has not run"
