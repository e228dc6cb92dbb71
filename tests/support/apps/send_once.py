"""Tasks that send an SMS over HTTP once, and die at the given step."""

import http.client
import json
import os
import signal

import redis

from celery_dlock import singleton_task
from tests.support.apps.base import make_app
from tests.support.polling import eventually

app = make_app(
    "send_once",
    worker_log_color=False,
)
notes = redis.Redis.from_url(os.environ["DLOCK_TEST_RESULT_URL"], decode_responses=True)


def send(self, n, port=0, end="", gate=""):
    """Sends SMS `n` to the gateway. `end`: how its first run ends, at which step of the call."""
    lease = self.lease
    first = not lease.after_crash and not self.request.retries
    facts = {"n": n, "id": self.request.id, "pid": os.getpid(), "key": lease.idempotency_key}
    notes.rpush("runs", json.dumps({**facts, "after_crash": lease.after_crash, "retries": self.request.retries}))
    if gate:
        notes.blpop(f"gate:{gate}", timeout=30)
    _end(self, end if first else "", "before")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/", json.dumps({"id": n, "key": lease.idempotency_key}))
    if first and end == "during":
        # The gateway has the SMS, and its answer is not read.
        eventually(lambda: _received(port, n))
    _end(self, end if first else "", "during")
    connection.getresponse().read()
    _end(self, end if first else "", "after")
    return object() if end == "unreadable" else f"sent {n}"


def _received(port, n):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/")
    return json.loads(connection.getresponse().read()).get(n)


def _end(task, end, step):
    if end == step:
        os.kill(os.getpid(), signal.SIGKILL)
    if step != "before":
        return
    if end == "exit":
        raise SystemExit(3)
    if end == "fail":
        raise ValueError("as asked")
    if end == "retry":
        raise task.retry(countdown=0, max_retries=1)


def define(name, **options):
    options = {"once_per": 60, **options}
    return singleton_task(app=app, bind=True, name=f"send_once.{name}", key=["n"], **options)(send)


runs = define("runs")
holds = define("holds", after_crash="hold")
holds_late = define("holds_late", after_crash="hold", acks_late=True, reject_on_worker_lost=True)
holds_briefly = define("holds_briefly", after_crash="hold", ttl=1.5)
holds_queue = define("holds_queue", after_crash="hold", on_conflict="queue")
returns = define("returns", on_used="return")
raises = define("raises", on_used="raise")
forever = define("forever", once_per="forever", on_used="raise")


@singleton_task(app=app, bind=True, name="send_once.plainly_locked")
def plainly_locked(self):
    """Without once_per there is no idempotency key."""
    return self.lease.idempotency_key


@app.task(name="send_once.shout")
def shout(text):
    return text.upper()
