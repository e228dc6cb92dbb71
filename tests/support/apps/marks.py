"""Marks that tasks write about themselves, in the result backend's database."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from celery_dlock.locking.events import Event

FOR_EVER = 30.0


def marks_client() -> redis.Redis:
    # Read now, not at import: a test process imports this once and the apps again and again.
    return redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"])


def mark(row: str, word: str) -> None:
    """Write down that `word` happened to `row` now."""
    at = time.monotonic()
    with marks_client() as client:
        client.rpush(f"marks:{row}", json.dumps([word, at, os.getpid()]))


def starts(row: str) -> int:
    with marks_client() as client:
        return sum(json.loads(text)[0] == "start" for text in client.lrange(f"marks:{row}", 0, -1))


@contextmanager
def noted(row: str) -> Iterator[None]:
    """Mark the start of the block, and its end by the name of what it raised."""
    try:
        mark(row, "start")  # in the block: a process that waits for it may end the body before it has gone on
        yield
    except BaseException as error:
        mark(row, type(error).__name__)
        raise
    mark(row, "return")


def beat(row: str, seconds: float = FOR_EVER) -> None:
    """Write the time down again and again, so that a death that leaves no mark can be dated."""
    end = time.monotonic() + seconds
    with marks_client() as client:
        while time.monotonic() < end:
            client.set(f"beat:{row}", time.monotonic())
            time.sleep(0.005)


def mark_lost(event: Event, **_: Any) -> None:
    """Write down why a lease was lost; a receiver of `signals.lock_lost`."""
    mark(f"lost {event.name}", event.reason)
