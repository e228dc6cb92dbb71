"""Celery: a message whose body is no container ends the worker."""

from __future__ import annotations

from tests.upstream.environment import ends, running_app


def fault() -> str:
    with running_app() as running:
        running.publish(5, id="1", task="echo")
        return ends(running)
