"""The tasks of benchmarks/contention.py: calls that wait in their worker slots for one lock."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery

from celery_dlock import singleton_task

_SERVER, _FOLDER = os.environ["DLOCK_BENCH_SERVER"], Path(os.environ["DLOCK_BENCH_FOLDER"])
BODY = 0.01

app = Celery("contention", broker=f"{_SERVER}/0", set_as_current=False)
app.conf.update(dlock_url=f"{_SERVER}/2", worker_prefetch_multiplier=1, task_ignore_result=True)


@singleton_task(app=app, name="waits", key="waits", wait=600, on_conflict="raise")
def waits(number: int) -> None:
    started = time.monotonic()
    time.sleep(BODY)
    with (_FOLDER / "diary").open("a") as diary:
        diary.write(f"{started} {time.monotonic()} {number}\n")
