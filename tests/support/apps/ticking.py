"""Tasks that beats send every second or so, each run noted in Redis with the tick it was for."""

import json
import os

import redis

from celery_dlock import singleton_task
from tests.support.apps.base import make_app

#: Seconds.
EVERY = float(os.environ.get("TICKING_EVERY", "1"))

app = make_app(
    "ticking",
    worker_log_color=False,
    beat_schedule={"often": {"task": "ticking.tick", "schedule": EVERY}},
    beat_scheduler=os.environ.get("TICKING_SCHEDULER", "celery.beat:PersistentScheduler"),
)
notes = redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"], decode_responses=True)


def note(request):
    facts = {"id": request.id, "task": request.task, "tick": request.get("dlock_tick")}
    headers = request.headers or {}
    assert "trace" in headers or headers.get("dlock_tick") == facts["tick"]
    notes.rpush("runs", json.dumps(facts))


# A tick that comes while the one before it runs is retried. The second message of a tick is too, and is skipped then.
@singleton_task(
    app=app, name="ticking.tick", bind=True, key="tick", once_per="tick", on_conflict="retry", retry_delay=0.05
)
def tick(self, end=""):
    note(self.request)
    attempt = notes.incr(f"attempts:{self.request.id}")
    if end == "retry" and not self.request.retries:
        raise self.retry(countdown=0)
    if end == "fail" and attempt == 1:
        raise ValueError("the first run fails")
    if end == "publish":
        other.delay()
        tick.delay()
    if end == "replace":
        raise self.replace(other.s())
    return end


@singleton_task(app=app, name="ticking.other", bind=True, once_per="tick", on_conflict="retry", retry_delay=0.05)
def other(self):
    note(self.request)


@singleton_task(
    app=app, name="ticking.brief", bind=True, once_per="tick", misfire_grace=60, on_conflict="retry", retry_delay=0.05
)
def brief(self):
    note(self.request)


@singleton_task(app=app, name="ticking.instead", bind=True, once_per="tick", misfire_grace=60, skip_result="too late")
def instead(self):
    note(self.request)
