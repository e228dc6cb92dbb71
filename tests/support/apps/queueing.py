"""One body under every option of the queue policy; each run notes in Redis when it entered and left."""
# ruff: noqa: ARG001 - arguments of tasks are there for their locks, not for their bodies

import os
import signal

from celery.exceptions import Ignore, Reject
from kombu import Queue
from kombu.common import Broadcast

from celery_dlock import signals, singleton_task
from tests.support.apps.base import History, canvas_tasks, make_app

app = make_app(
    "queueing",
    configurable=True,
    accept_content=["json", "pickle", "yaml"],
    result_expires=600,
    # a log line of the library is looked for, not its frame
    worker_log_color=False,
    # so that a message of it lies in the worker no longer than its lock asks for
    worker_prefetch_multiplier=100,
    task_queues=[Queue("celery"), Broadcast("everybody")],
)

history = History.of_environ()


def work(self, n, gate="", end="", text=""):
    """The body: `n` is its lock, `gate` what it waits for, `end` how it ends, `text` what it brings along."""
    request = self.request
    facts = {"task": self.name, "id": request.id, "n": n, "retries": request.retries, "text": text}
    with history.recorded_body(facts, token=self.lease.token, lock=self.lease.name):
        again = history.incr(f"runs:{request.id}") > 1
        if not again:
            history.pass_gate(gate)
        return _end(self, n, end, again)


def _end(task, n, end, again):
    if end == "fail":
        raise ValueError("as asked")
    if end == "ignore":
        raise Ignore
    if end == "reject":
        raise Reject("as asked", requeue=False)
    if not again:
        _end_once(task, n, end)
    return n


def _end_once(task, n, end):
    """These run once more, or would."""
    if end == "requeue":
        raise Reject("as asked", requeue=True)
    if end == "retry":
        raise task.retry(countdown=0, max_retries=3)
    if end == "replace":
        raise task.replace(task.si(n, text="replaced"))
    if end == "die":
        history.note("out", task=task.name, id=task.request.id, n=n)
        os.kill(os.getpid(), signal.SIGKILL)


def define(name, **options):
    options = {"key": ["n"], "on_conflict": "queue", **options}
    return singleton_task(app=app, name=f"queueing.{name}", bind=True, **options)(work)


early = define("early")
late = define("late", acks_late=True)
late_brief = define("late_brief", acks_late=True, ttl=2)
other = define("other")
comes_back = define("comes_back", acks_late=True, reject_on_worker_lost=True)
three = define("three", queue_limit=3)
three_skip = define("three_skip", queue_limit=3, queue_overflow="skip")
three_drop = define("three_drop", queue_limit=3, queue_overflow="drop_oldest")
latest = define("latest", queue_limit=1, queue_overflow="drop_oldest")
saves = define("saves", debounce=(2, 4), acks_late=True)
saves_patiently = define("saves_patiently", debounce=300, acks_late=True, reject_on_worker_lost=True)
once = define("once", once_per=60)
shared = define("shared", key="{n}", scope="shared")
shared_skips = define("shared_skips", key="{n}", scope="shared", on_conflict="skip")
shared_retries = define("shared_retries", key="{n}", scope="shared", on_conflict="retry", retry_delay=60)


plain, failed_link = canvas_tasks(app, history)


@singleton_task(app=app, bind=True, name="queueing.parcel", key=["n"], on_conflict="queue", acks_late=True)
def parcel(self, n, gate="", end="", secret="", **more):
    """Says what it was given."""
    history.note("in", id=self.request.id, n=n, secret=secret)
    history.pass_gate(gate)
    return n


@singleton_task(app=app, bind=True, name="queueing.nests", key=["n"], on_conflict="queue")
def nests(self, n, gate=""):
    """Enters its own lock once more, and another's of its own kind."""
    history.note("in", id=self.request.id, n=n)
    with self.lock_for(n):
        inside = self.lease.hold_count
    with self.lock_for(f"{n}-inside") as beside:
        history.pass_gate(gate)
        held = beside.locked()
    history.note("out", id=self.request.id, n=n)
    return [inside, held, self.lease.hold_count]


@signals.lock_queued.connect
def _queued(sender, event, **_):
    history.note("queued", id=event.task_id, task=sender.name, name=event.name, reason=event.reason, owner=event.owner)
