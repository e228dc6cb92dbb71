"""The smallest app that `start_worker` and `load_app` can use."""

import os

from celery import Celery

app = Celery(
    "echo",
    broker=os.environ["DLOCK_TEST_BROKER_URL"],
    backend=os.environ["DLOCK_TEST_RESULT_URL"],
)
app.conf.broker_connection_retry_on_startup = True


@app.task
def worker_pid() -> int:
    return os.getpid()
