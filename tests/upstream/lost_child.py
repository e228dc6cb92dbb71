"""Celery: the end of a call whose pool child was killed is stored up to 5 s after the death."""

from __future__ import annotations

import os
import signal
import time

from tests.support.polling import eventually
from tests.upstream.environment import Running, running_app

PROMPT = 2.0


def fault() -> str:
    with running_app("prefork") as running:
        # Celery looks for dead children every 5 s. The first death is found by such a look, and the second comes then.
        seconds = max(_seconds_until_stored(running), _seconds_until_stored(running))
    return f"stored {seconds:.1f} s after the death" if seconds > PROMPT else ""


def _seconds_until_stored(running: Running) -> float:
    result = running.tasks.pid_then_sleep.delay(60)
    pid = eventually(lambda: result.state == "PROGRESS" and result.info, within=20)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    eventually(result.ready, within=20)
    return time.monotonic() - killed
