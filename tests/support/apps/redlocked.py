"""Tasks whose locks are kept on several independent servers."""

import os
import time

from celery import Celery

from celery_dlock import SingletonTask, signals, singleton_task
from tests.support.apps.marks import mark_lost, noted

PLACES = os.environ["DLOCK_TEST_LOCK_URL"].split(",")

app = Celery("redlocked", broker=os.environ["DLOCK_TEST_BROKER_URL"], backend=os.environ["DLOCK_TEST_RESULT_URL"])
app.conf.update(
    dlock_url=PLACES if len(PLACES) > 1 else PLACES[0],
    dlock_quarantine=0,
    broker_connection_retry_on_startup=True,
)


signals.lock_lost.connect(mark_lost)


@singleton_task(app=app, bind=True, ttl=4, key="{row}", on_conflict="retry", retry_delay=0.05, retry_delay_max=0.2)
def work(self: SingletonTask, row: str, seconds: float) -> int:
    with noted(row):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.02)
        self.lease.ensure()
        return self.lease.token or 0
