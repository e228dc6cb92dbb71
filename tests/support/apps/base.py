"""The common part of the tests' apps: the places of their servers, and notes of what their bodies did."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from celery.signals import worker_init

from celery_dlock import LockLost, runtime
from celery_dlock.errors import StoreUnavailable


def make_app(name: str, *, configurable: bool = False, breaker_reset: float | None = None, **conf: Any) -> Celery:
    """Return an app of the servers that the environment names.

    Args:
        name: of the app.
        configurable: whether DLOCK_TEST_CONF, a JSON object, is read as further settings.
        breaker_reset: for its workers, in place of :data:`celery_dlock.runtime.BREAKER_RESET`.
        conf: further settings.
    """
    app = Celery(name, broker=os.environ["DLOCK_TEST_BROKER_URL"], backend=os.environ["DLOCK_TEST_RESULT_URL"])
    app.conf.update(
        {"dlock_url": os.environ["DLOCK_TEST_LOCK_URL"], "broker_connection_retry_on_startup": True, **conf}
    )
    if configurable:
        app.conf.update(json.loads(os.environ.get("DLOCK_TEST_CONF", "{}")))
    if breaker_reset is not None:
        worker_init.connect(lambda **_: setattr(runtime, "BREAKER_RESET", breaker_reset), weak=False)
    return app


def still_held(lease: Any) -> bool:
    """Return whether `ensure()` accepts the lease. A body that goes on all the same has its late write refused."""
    try:
        lease.ensure()
    except (LockLost, StoreUnavailable):
        return False
    return True


class History(redis.Redis):
    """Notes of what the bodies of an app did, in the result backend's database."""

    @classmethod
    def of_environ(cls) -> History:
        """Return the history of the app that is being imported.

        Its client has no timeout: the default one would end a body that waits at its gate.
        """
        url = os.environ["DLOCK_TEST_RESULT_URL"]
        made: History = cls.from_url(url, decode_responses=True, socket_timeout=None)
        return made

    def note(self, what: str, **facts: Any) -> None:
        """Add a note with the time and the process."""
        self.rpush("history", json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **facts}))

    def pass_gate(self, gate: str) -> None:
        """Block until the test opens the gate, or for 30 s, so that a worker that a test left ends."""
        if gate:
            self.blpop(f"gate:{gate}", timeout=30)

    @contextmanager
    def recorded_body(self, facts: dict[str, Any], **entered: Any) -> Iterator[None]:
        """Note when the body enters, with the facts `entered` too, and when it leaves."""
        self.note("in", **entered, **facts)
        try:
            yield
        finally:
            self.note("out", **facts)


def canvas_tasks(app: Celery, history: History) -> tuple[Any, Any]:
    """Define `plain`, a task without a lock for links, chains and chords, and `failed_link`, an errback."""

    @app.task(name=f"{app.main}.plain")
    def plain(*args: Any, **_kwargs: Any) -> Any:
        history.note("plain", args=repr(args))
        return args[0] if args else None

    @app.task(name=f"{app.main}.failed_link")
    def failed_link(task_id: str) -> None:
        history.note("link_error", id=task_id)

    return plain, failed_link
