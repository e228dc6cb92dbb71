"""An app of plain Celery tasks."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

app = Celery("plain", broker=os.environ["DLOCK_TEST_BROKER_URL"], backend=os.environ["DLOCK_TEST_RESULT_URL"])
app.conf.broker_connection_retry_on_startup = True


@app.task(name="echo")
def echo(value: Any = None) -> Any:
    return value


@app.task(name="fail")
def fail(*_args: Any) -> None:
    raise ValueError("as the reproduction wants it")


@app.task(name="pid_then_sleep", bind=True)
def pid_then_sleep(self: Any, seconds: float) -> None:
    self.update_state(state="PROGRESS", meta=os.getpid())
    time.sleep(seconds)
