"""Cycles of one kind for `server_cost`: reads a number of cycles from each input line, and answers ``done``.

It also drives the library of older commits, so it uses public names. The one exception is the delivery that a worker's
main process passes to a pool child.
"""

import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import redis
from celery import Celery
from celery.app.trace import build_tracer

from celery_dlock import Lock, singleton_task
from celery_dlock.messaging.message import PROPERTY, Delivery


def _ping(url: str) -> Callable[[int], object]:
    client = redis.Redis.from_url(url)

    def cycle(_number: int) -> None:
        client.ping()
        client.ping()

    return cycle


def _theirs(url: str) -> Callable[[int], object]:
    client = redis.Redis.from_url(url)

    def cycle(number: int) -> None:
        with client.lock(f"lock:{number}", timeout=30):
            pass

    return cycle


def _app(url: str) -> Celery:
    app = Celery("server-cost", set_as_current=False)
    app.conf.update(dlock_url=url, task_ignore_result=True)
    return app


def _lock(url: str) -> Callable[[int], object]:
    app = _app(url)

    def cycle(number: int) -> None:
        with Lock(f"lock:{number}", app=app):
            pass

    return cycle


def _task(url: str) -> Callable[[int], object]:
    app = _app(url)

    @singleton_task(app=app, name="server_cost.task")
    def task(number: int) -> None:
        """Run under a lock of its own, because the arguments differ."""

    trace: Callable[..., Any] = build_tracer(task.name, app.tasks[task.name], app=app)

    def cycle(number: int) -> None:
        # As a worker's pool child runs it: with the identity of a message, which arrived some time ago.
        request: dict[str, Any] = {"id": f"{number:032x}", "delivery_info": {}, "hostname": "bench@localhost"}
        now = time.monotonic()
        raw: tuple[Any, ...] = b"", "application/json", "utf-8", {}, {}, "celery"
        request["properties"] = {PROPERTY: tuple(Delivery(uuid.uuid4().hex, now, now, monitored=False, raw=raw))}
        result = trace(request["id"], (number,), {}, request)
        assert result.info is None, result

    return cycle


KINDS: dict[str, Callable[[str], Callable[[int], object]]] = {
    "ping": _ping,
    "redis-py": _theirs,
    "lock": _lock,
    "task": _task,
}


def _inputs() -> Iterator[int]:
    return map(int, sys.stdin)


def main() -> None:
    kind, url = sys.argv[1:]
    cycle = KINDS[kind](url)
    numbers = itertools.count()
    for cycles in _inputs():
        for _ in range(cycles):
            cycle(next(numbers))
        print("done", flush=True)


if __name__ == "__main__":
    main()
