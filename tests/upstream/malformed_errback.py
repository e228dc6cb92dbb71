"""Celery: if a task fails and its message has a malformed errback, a worker of the pool solo ends."""

from __future__ import annotations

from tests.upstream.environment import ends, running_app


def fault() -> str:
    with running_app() as running:
        running.publish([[], {}, {"errbacks": 5}], id="1", task="fail")
        return ends(running)
