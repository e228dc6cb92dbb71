"""A user's own test run, with Celery's embedded worker: `python -m tests.support.apps.embedded ROW SECONDS`."""

import sys

from celery.contrib.testing.worker import start_worker

from tests.support.apps.keeping import app, brief

if __name__ == "__main__":
    row, seconds = sys.argv[1:]
    with start_worker(app, perform_ping_check=False):
        brief.delay(row, "sleep", float(seconds)).get(timeout=60)
