"""A task that writes one row for each number, in a transaction that also settles its run (``once_per``)."""

import os
import random
import time

import psycopg

from celery_dlock import LockLost, singleton_task
from celery_dlock.errors import StoreUnavailable
from tests.support.apps.base import make_app

app = make_app(
    "settling",
    # Messages of a killed worker are delivered again after this time.
    broker_transport_options={"visibility_timeout": 3},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    dlock_timeout=2,
    result_expires=600,
)


@singleton_task(
    app=app, bind=True, key=["number"], once_per="forever", ttl=2, on_conflict="retry", retry_delay=0.2,
    retry_delay_max=1, autoretry_for=(psycopg.Error, StoreUnavailable, LockLost), max_retries=None,
    retry_backoff=False, default_retry_delay=0.2,
)  # fmt: skip
def book(self, number, settled=True):
    """Write a row. The process may be killed at every moment."""
    with psycopg.connect(os.environ["DLOCK_TEST_DATABASE"], connect_timeout=5) as connection:
        settle = self.lease.settle if settled else self.lease.guard
        settle(connection)
        connection.execute("INSERT INTO booking (number) VALUES (%s)", [number])
        _pause()
    _pause()


def _pause():
    time.sleep(random.choice((0, 0.01, 0.05)))
