"""The ticking app under django-celery-beat's scheduler, with a database in the file that the environment names."""

import os

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django_celery_beat"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ["TICKING_DATABASE"],
            "OPTIONS": {"timeout": 20},
        }
    },
    USE_TZ=True,
    TIME_ZONE="UTC",
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()

from django.core.management import call_command  # noqa: E402  # works only after the setup, as all below
from django_celery_beat.schedulers import DatabaseScheduler  # noqa: E402

from celery_dlock.beat import TickScheduler  # noqa: E402
from tests.support.apps.ticking import app  # noqa: E402

__all__ = ["Scheduler", "app"]


class Scheduler(TickScheduler, DatabaseScheduler):
    pass


if __name__ == "__main__":
    call_command("migrate", verbosity=0)
