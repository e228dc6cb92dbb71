"""Celery: if a chord inside another chord fails, the body of the outer one stays PENDING for ever."""

from __future__ import annotations

from typing import Any

from celery import chord

from tests.support.polling import eventually
from tests.upstream.environment import running_app

PATIENCE = 3.0


def fault() -> str:
    with running_app() as running:
        echo, fail = running.tasks.echo, running.tasks.fail
        inner = chord([fail.si(), echo.si(1)], echo.s())
        outer: Any = chord([inner, echo.si(2)], echo.s()).apply_async()
        inner_body = outer.parent.results[0]
        eventually(inner_body.ready, within=20)
        try:
            eventually(outer.ready, within=PATIENCE)
        except AssertionError:
            return f"the inner body is {inner_body.state}, the outer one {outer.state}"
        return ""
