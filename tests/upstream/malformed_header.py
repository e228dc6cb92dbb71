"""Celery: a header of another type than Celery expects ends the worker."""

from __future__ import annotations

from tests.upstream.environment import ends, running_app


def fault() -> str:
    with running_app() as running:
        running.publish([[], {}, {}], id="1", task="echo", timelimit=5)
        return ends(running)
