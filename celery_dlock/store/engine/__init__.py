"""One engine that runs the rules (:mod:`celery_dlock.store.rules`) over the data of a small backend."""
