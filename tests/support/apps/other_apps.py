"""Tasks whose bodies take locks of other apps, in another store or in their own."""

import os
import time

from celery import Celery

from celery_dlock import Lock, signals, singleton_task
from tests.support.apps.base import make_app
from tests.support.apps.marks import mark, mark_lost, marks_client, noted

app = make_app("other_apps")
signals.lock_lost.connect(mark_lost)


@app.task(name="other_apps.plain")
def plain(row: str, url: str, ttl: float) -> None:
    _hold(row, url, ttl)


@singleton_task(app=app, name="other_apps.locked", key="{row}", ttl=60)
def locked(row: str, url: str, ttl: float) -> None:
    _hold(row, url, ttl)


def _hold(row: str, url: str, ttl: float) -> None:
    """Hold the lock ``row`` of an app that only this process knows, and that of the worker's app."""
    other = Celery(f"other {row}", broker="memory://", set_as_current=False)
    other.conf.dlock_url = url
    with noted(row), Lock(row, app=other, ttl=ttl) as lock, Lock(f"own {row}", app=app, ttl=60):
        mark(row, "held")
        with marks_client() as client:
            end = time.monotonic() + 40
            while time.monotonic() < end and not client.exists(f"go {row}"):
                time.sleep(0.05)
        lease = lock.lease
        assert lease is not None
        mark(row, f"still held {lease.held}")


@singleton_task(app=app, name="other_apps.many", key="{row}")
def many(row: str, urls: list[str]) -> None:
    """Hold a lock in each of these stores, and one that cannot be passed to another process."""
    for number, url in enumerate(urls):
        other = Celery(f"many {number}", broker="memory://", set_as_current=False)
        other.conf.dlock_url = url
        assert Lock(f"{row} {number}", app=other, ttl=60).acquire()
    mark(row, "held")
    os.kill(os.getpid(), 9)
