"""The shop's Celery app and its settings."""

import os

from celery import Celery
from celery.schedules import crontab

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

# The URL of the lock store, for example postgresql://user@host/db.
DLOCK_URL = os.environ.get("DLOCK_URL", REDIS_URL)

# Seconds between two "nights" in the demo. 0: the report runs at night.
REPORT_EVERY = float(os.environ.get("SHOP_REPORT_EVERY", "0"))

app = Celery("shop", broker=REDIS_URL, backend=REDIS_URL, include=["example_project.shop.tasks"])

app.conf.update(
    dlock_url=DLOCK_URL,
    dlock_prefix="shop",
    broker_connection_retry_on_startup=True,
    beat_schedule={
        "nightly-report": {
            "task": "shop.nightly_report",
            "schedule": REPORT_EVERY or crontab(hour="3", minute="0"),
        },
    },
)
