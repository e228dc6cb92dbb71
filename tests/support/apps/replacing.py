"""One body under ``on_conflict="replace"``; each run notes in Redis when it entered and left, and how."""

import signal
import time

from celery_dlock import Replaced, singleton_task
from tests.support.apps.base import History, canvas_tasks, make_app

app = make_app("replacing", configurable=True, result_expires=600, worker_log_color=False)

history = History.of_environ()


def work(self, n, seconds=0.0, how="", text=""):
    """The body: many small steps, as Python code has them.

    Args:
        self: the task.
        n: its lock.
        seconds: how long it lasts.
        how: "deaf": it goes on after it was stopped. "ensure": it asks its lease in each step. "retry": it retries.
            "stubborn": no signal and no exception ends it.
        text: what it brings along. "tidy": after its stop, it cleans up for longer than from one renewal to the next.
    """
    request = self.request
    facts = {"task": self.name, "id": request.id, "n": n, "retries": request.retries, "text": text}
    with history.recorded_body(facts, token=self.lease.token):
        end = time.monotonic() + seconds
        if how == "stubborn":
            endure(request.id, end)
        while time.monotonic() < end:
            try:
                time.sleep(0.02)
                beat(request.id)
                if how == "ensure":
                    self.lease.ensure()
            except Replaced:
                history.note("stopped", replaced=self.lease.replaced, **facts)
                if text == "tidy":
                    clean_up(facts)
                if how != "deaf":
                    raise
    history.note("returned", replaced=self.lease.replaced, **facts)
    if how == "retry" and not request.retries:
        raise self.retry(countdown=1)
    return n


def endure(task_id, end):
    """Go on until the end, whatever comes: as C code that no signal interrupts."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while time.monotonic() < end:
        try:
            time.sleep(0.02)
            beat(task_id)
        except BaseException:  # noqa: BLE001  # the worst body that there is
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def beat(task_id):
    """Show that this body lives."""
    history.set(f"beat:{task_id}", time.monotonic())


def clean_up(facts):
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        time.sleep(0.02)
    history.note("cleaned", **facts)


def define(name, **options):
    options = {"key": ["n"], "on_conflict": "replace", "acks_late": True, **options}
    return singleton_task(app=app, name=f"replacing.{name}", bind=True, **options)(work)


newest = define("newest")
brief = define("brief", ttl=3, reject_on_worker_lost=True)
early = define("early", acks_late=False)
asked = define("asked", stop="ask")
protected = define("protected", min_hold=3)
killed = define("killed", stop=1, ttl=3, reject_on_worker_lost=True)
killed_early = define("killed_early", stop=1, ttl=3, acks_late=False)
killed_early.retry_on_worker_lost = True  # read by Celery 5.7 and newer; older ones have no such option
killed_at_once = define("killed_at_once", stop=0, ttl=3)
spared = define("spared", stop=20, ttl=3)
limited = define("limited", stop=3, ttl=3, time_limit=3)
retried = define("retried", autoretry_for=(Exception,), retry_kwargs={"countdown": 0})


@app.task(name="replacing.bystander")
def bystander(seconds):
    """A task without a lock, in the same pool."""
    time.sleep(seconds)
    return seconds


@app.task(name="replacing.moved", bind=True)
def moved(self, n):
    raise self.replace(newest.si(n))


plain, failed_link = canvas_tasks(app, history)
