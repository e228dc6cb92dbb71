"""A beat of django-celery-beat in a project with ``USE_TZ=False``: it prints the due times of its first ticks."""

import sys
import time

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django_celery_beat"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    USE_TZ=False,
    TIME_ZONE="America/New_York",
    DJANGO_CELERY_BEAT_TZ_AWARE=sys.argv[1] == "aware",
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()

from celery import Celery  # noqa: E402  # works only after the setup, as all below
from django.core.management import call_command  # noqa: E402
from django_celery_beat.models import PeriodicTask  # noqa: E402
from django_celery_beat.schedulers import DatabaseScheduler  # noqa: E402

from celery_dlock.beat import TickScheduler  # noqa: E402

TICKS = 3


class Scheduler(TickScheduler, DatabaseScheduler):
    def send_task(self, *args, headers, **options):
        due.append(headers["dlock_tick"]["due"])


call_command("migrate", verbosity=0)
due: list[float] = []
app = Celery("project", broker="memory://")
app.conf.beat_schedule = {"often": {"task": "project.often", "schedule": 0.5}}
scheduler = Scheduler(app=app)
end = time.monotonic() + 30
while len(due) < TICKS and time.monotonic() < end:
    time.sleep(max(0.0, min(scheduler.tick(), 0.1)))
    scheduler.sync()  # beat does so every three minutes, and at its end
kept = PeriodicTask.objects.get(name="often").last_run_at
sys.stdout.write(" ".join([*map(str, due), kept.isoformat()]))
