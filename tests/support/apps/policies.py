"""One body under every policy; each run notes in Redis when it entered and left."""
# ruff: noqa: ARG001 - arguments of tasks are there for their locks, not for their bodies

import os
import signal
import time
from datetime import timedelta

from celery.exceptions import Ignore, Reject
from celery.signals import task_failure, task_postrun

from celery_dlock import SingletonTask, signals, singleton_task
from tests.support.apps.base import History, canvas_tasks, make_app

app = make_app(
    "policies",
    configurable=True,
    accept_content=["json", "pickle", "yaml"],
    result_expires=600,
    # a log line of the library is looked for, not its frame
    worker_log_color=False,
)

history = History.of_environ()


def work(self, n, gate="", end="", text=""):
    """The body: `n` is its lock, `gate` what it waits for, `end` how it ends, `text` what it brings along."""
    request = self.request
    facts = {"task": self.name, "id": request.id, "n": n, "retries": request.retries, "node": request.hostname}
    lease = self.lease
    with history.recorded_body(facts, token=lease.token, lock=lease.name, eta=request.eta):
        if not request.retries:
            history.pass_gate(gate)
        return _end(self, n, end)


def _end(task, n, end):
    request = task.request
    if end == "fail":
        raise ValueError("as asked")
    if end == "retry" and not request.retries:
        raise task.retry(countdown=0, max_retries=3)
    if end == "replace" and not request.replaced_task_nesting:
        raise task.replace(task.si(n))
    if end == "ignore":
        raise Ignore
    if end == "reject":
        raise Reject("as asked", requeue=False)
    # Not by the flag `redelivered`: a copy that we put back while the dead one's lock still stood has none.
    if end == "die" and history.set(f"died:{request.id}", 1, nx=True):
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "request":
        return {name: value for name, value in vars(request).items() if not name.startswith("_")}
    return n


class Noting(SingletonTask):
    """Celery's hooks for a failure, noted."""

    abstract = True

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        history.note("on_failure", id=task_id, error=type(exc).__name__)

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        if status != "SUCCESS":
            history.note("after_return", id=task_id, status=status)


LINGER = 0.1


class Lingering(Noting):
    """Takes its time between the publishing of what follows it and its release."""

    abstract = True

    def after_return(self, *args):
        time.sleep(LINGER)


@task_postrun.connect
def _linger(sender, state, **_):
    """The same where Celery calls no after_return."""
    if isinstance(sender, Lingering) and state in ("RETRY", "IGNORED"):
        time.sleep(LINGER)


class Slow(Noting):
    """Holds its lock for long behind its body's end, when its chain's next step is published already."""

    abstract = True

    def on_success(self, *args):
        time.sleep(1.6)


@task_failure.connect
def _noting(task_id, exception, **_):
    history.note("task_failure", id=task_id, error=type(exception).__name__)


def define(name, base=Noting, **options):
    return singleton_task(app=app, base=base, name=f"policies.{name}", bind=True, key=["n"], **options)(work)


skips = define("skips")
skips_late = define("skips_late", acks_late=True)
skips_as_none = define("skips_as_none", skip_result=None)
skips_as_value = define("skips_as_value", skip_result={"skipped": True})
skips_as_value_late = define("skips_as_value_late", skip_result={"skipped": True}, acks_late=True)
skips_unstored = define("skips_unstored", ignore_result=True)
retries = define("retries", on_conflict="retry", retry_delay=0.1, retry_delay_max=0.4)
retries_slowly = define("retries_slowly", on_conflict="retry", retry_delay=2.0)
retries_twice = define("retries_twice", on_conflict="retry", retry_delay=0.05, retry_limit=2)
retries_without_own = define("retries_without_own", on_conflict="retry", retry_delay=0.1, max_retries=0)
retries_late = define("retries_late", on_conflict="retry", retry_delay=0.1, retry_delay_max=0.4, acks_late=True)
queues = define("queues", on_conflict="queue")
waits = define("waits", wait=10, on_conflict="raise")
waits_briefly = define("waits_briefly", wait=0.4, on_conflict="raise")
waits_then_skips = define("waits_then_skips", wait=0.3)
waits_then_retries = define("waits_then_retries", wait=0.3, on_conflict="retry", retry_delay=0.1)
waits_then_queues = define("waits_then_queues", wait=0.3, on_conflict="queue")
waits_before_it_queues = define("waits_before_it_queues", wait=10, on_conflict="queue")
waits_late = define("waits_late", wait=10, on_conflict="raise", acks_late=True)
raises = define("raises", on_conflict="raise")
raises_late = define("raises_late", on_conflict="raise", acks_late=True)
tracked_late = define("tracked_late", acks_late=True, track_started=True)
comes_back_late = define("comes_back_late", acks_late=True, reject_on_worker_lost=True)
short_lived = define("short_lived", acks_late=True, ttl=4)
lingers_and_skips = define("lingers_and_skips", Lingering)
lingers_and_raises = define("lingers_and_raises", Lingering, on_conflict="raise")
slow_skips = define("slow_skips", Slow)
slow_raises = define("slow_raises", Slow, on_conflict="raise")
slow_waits = define("slow_waits", Slow, wait=0.1, on_conflict="raise")
once = define("once", once_per=60)
once_briefly = define("once_briefly", once_per=timedelta(seconds=1.5))
once_as_value = define("once_as_value", once_per=60, skip_result="done before")
once_raises = define("once_raises", once_per=60, on_conflict="raise", acks_late=True, reject_on_worker_lost=True)


@singleton_task(app=app, bind=True, name="policies.defaults")
def defaults(self, value, more=7):
    """Keyed by all of its arguments; says under which lock it ran."""
    return self.lease.name


plain, failed_link = canvas_tasks(app, history)


@singleton_task(app=app, bind=True, name="policies.parcel", key=["n"], on_conflict="retry", retry_delay=2.0)
def parcel(self, n, secret="", **more):
    """Counts its runs."""
    history.note("parcel", id=self.request.id, n=n)
    return n


@singleton_task(app=app, bind=True, name="policies.parcel_retries", key=["n"], on_conflict="retry", retry_delay=0.5)
def parcel_retries(self, n):
    """Retries itself once, later than the test looks."""
    if not self.request.retries:
        raise self.retry(countdown=60)


@singleton_task(app=app, bind=True, name="policies.nests", key=["n"])
def nests(self, n, deep=False):
    """Runs itself eagerly inside its own body: how often the lock is held inside, and after it."""
    if deep:
        return self.lease.hold_count
    inside = self.apply((n, True)).get(disable_sync_subtasks=False)
    return [n, inside, self.lease.hold_count]


@singleton_task(app=app, bind=True, name="policies.peeks")
def peeks(self):
    """Note the state of the body's lease."""
    self.lease.ensure()
    self.lease.extend(5)
    return self.lease.token, self.lease.held, self.lease.remaining(), self.lease.lost


@singleton_task(app=app, bind=True, name="policies.calls_itself", key=["n"])
def calls_itself(self, n, gate="", deep=False):
    """Calls itself directly, and then waits at its gate: is the lease still held?"""
    if not deep:
        self(n, deep=True)
        history.note("in", id=self.request.id, n=n)
        history.pass_gate(gate)
    return self.lease.held


@singleton_task(app=app, base=Noting, bind=True, name="policies.heard", key=["n"])
def heard(self, n, gate="", end=""):
    """Its signals are noted; one receiver raises at each of them."""
    history.note("in", id=self.request.id, n=n)
    history.pass_gate(gate)
    return n


def _raise(sender, **_):
    if sender is not None and sender.name == "policies.heard":
        raise RuntimeError("a receiver that raises")


def _tell(sender, event, **_):
    if sender is not None and sender.name == "policies.heard":
        history.note(
            "signal", kind=event.kind, sender=sender.name, name=event.name, id=event.task_id, token=event.token,
            reason=event.reason,
        )  # fmt: skip


for _signal in (signals.lock_acquired, signals.lock_refused, signals.lock_released, signals.lock_lost,
                signals.lock_skipped):  # fmt: skip
    _signal.connect(_raise, weak=False)
    _signal.connect(_tell, weak=False)


def _key_raises(n):
    raise KeyError(n)


def _same(n):
    return n


for _name, _key in (
    ("key_raises", _key_raises),
    ("key_is_none", lambda n: None),
    ("key_is_int", lambda n: 7),
    ("key_is_empty", lambda n: ""),
):
    singleton_task(app=app, name=f"policies.{_name}", key=_key)(_same)


@singleton_task(app=app, bind=True, name="policies.fails_for_ever", key=["n"], max_retries=1, default_retry_delay=0)
def fails_for_ever(self, n):
    """Retries itself as often as it may."""
    raise self.retry(exc=ValueError("as asked"), countdown=0)
