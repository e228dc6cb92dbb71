"""kombu: a question to workers has a timeout, and waits for ever all the same if the Redis broker does not answer."""

from __future__ import annotations

import threading
from contextlib import suppress

from celery import Celery

from tests.upstream.environment import running_server

TIMEOUT = 0.5
PATIENCE = 3.0


def fault() -> str:
    with running_server() as server:
        app = Celery("asking", broker=server.url(), set_as_current=False)
        server.pause()
        asking = threading.Thread(target=_ask, args=(app,), daemon=True)
        asking.start()
        asking.join(PATIENCE)
        return f"ping(timeout={TIMEOUT}) still waits after {PATIENCE:g} s" if asking.is_alive() else ""


def _ask(app: Celery) -> None:
    with suppress(Exception):  # at the end of the server
        app.control.ping(timeout=TIMEOUT)
