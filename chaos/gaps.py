"""A process that was not scheduled says so: it could not renew what it held."""

import os
import time
from typing import Any

from celery.signals import worker_init

from celery_dlock.utils import threads as native
from chaos.history import History

#: Seconds between two looks, and from how many on it is a gap.
LOOK, GAP = 0.1, 0.5


def watch_for_gaps(history: History) -> None:
    """From the start of a worker in this process on, note whenever it was not scheduled, as the event "gap"."""

    @worker_init.connect(weak=False)
    def watch(**_: Any) -> None:
        pid = os.getpid()

        def look() -> None:
            last = time.monotonic_ns()
            # A forked child has no such thread, so this one always speaks of the main process.
            while True:
                native.sleep(LOOK)
                now = time.monotonic_ns()
                if now - last > GAP * 1e9:
                    history.note("gap", main=pid, since=last)
                last = now

        native.start_daemon(look)
