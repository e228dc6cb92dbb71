"""The app of the idle worker of benchmarks/stores.py."""

import os

from celery import Celery

from celery_dlock import singleton_task

app = Celery("stores", broker="memory://", set_as_current=False)
app.conf.update(dlock_url=os.environ["DLOCK_BENCH_URL"])


@singleton_task(app=app)
def work() -> None:
    """Do nothing."""
