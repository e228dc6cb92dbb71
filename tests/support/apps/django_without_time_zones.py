"""A beat of django-celery-beat in a project with ``USE_TZ=False``: it prints the due times of its first ticks.

Arguments: ``naive`` or ``aware``, which is what django-celery-beat itself keeps; the project's time zone; and the kind
of schedule, ``often`` or ``clocked``.
"""

import os
import sys
import time
from datetime import datetime, timedelta, timezone

import django
from django.conf import settings

_, KEPT, ZONE, KIND = sys.argv
# As Django does for a settings module.
os.environ["TZ"] = ZONE
time.tzset()
settings.configure(
    INSTALLED_APPS=["django_celery_beat"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    USE_TZ=False,
    TIME_ZONE=ZONE,
    DJANGO_CELERY_BEAT_TZ_AWARE=KEPT == "aware",
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()

from celery import Celery  # noqa: E402  # works only after the setup, as all below
from django.core.management import call_command  # noqa: E402
from django_celery_beat.models import ClockedSchedule, PeriodicTask  # noqa: E402
from django_celery_beat.schedulers import DatabaseScheduler  # noqa: E402

from celery_dlock.beat import TickScheduler  # noqa: E402

TICKS = {"often": 3, "clocked": 1}[KIND]


class Scheduler(TickScheduler, DatabaseScheduler):
    def send_task(self, *args, headers, **options):
        due.append(headers["dlock_tick"]["due"])


call_command("migrate", verbosity=0)
due: list[float] = []
app = Celery("project", broker="memory://")
app.conf.result_expires = None  # no second entry
if KIND == "often":
    app.conf.beat_schedule = {"often": {"task": "project.often", "schedule": 0.5}}
else:
    soon = datetime.now(timezone.utc).replace(tzinfo=None) + timedelta(seconds=1)
    clocked = ClockedSchedule.objects.create(clocked_time=soon)
    PeriodicTask.objects.create(name="clocked", task="project.clocked", clocked=clocked, one_off=True)
scheduler = Scheduler(app=app)
end = time.monotonic() + 30
while len(due) < TICKS and time.monotonic() < end:
    time.sleep(max(0.0, min(scheduler.tick(), 0.1)))
    scheduler.sync()  # beat does so every three minutes, and at its end
kept = PeriodicTask.objects.get(name=KIND).last_run_at
sys.stdout.write(" ".join([*map(str, due), kept.isoformat()]))
