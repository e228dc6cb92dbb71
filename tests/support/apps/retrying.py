"""Bodies that retry themselves, and rivals of every policy for the same lock; calls that bring options of their own."""

import time
from datetime import datetime, timedelta, timezone

from celery_dlock import SingletonTask, singleton_task
from tests.support.apps.base import History, make_app

app = make_app(
    "retrying",
    configurable=True,
    result_expires=600,
    worker_log_color=False,
    dlock_call_options="all",
)

history = History.of_environ()


class Again(Exception):
    pass


def retries(self, n, way="", seconds=0.0):
    """The first run ends in a retry, asked for in this way; the second one succeeds."""
    request = self.request
    facts = {"task": self.name, "id": request.id, "n": n, "retries": request.retries}
    lease = self.lease
    with history.recorded_body(facts, token=lease.token, lock=lease.name):
        if request.retries:
            return n
        if way == "auto":
            raise Again
        if way == "eta":
            raise self.retry(eta=datetime.now(timezone.utc) + timedelta(seconds=seconds))
        if way == "no throw":
            self.retry(countdown=seconds, throw=False)
            return n
        if way == "other args":
            raise self.retry((f"{n}-other", way, seconds), countdown=seconds)
        if way == "no more":
            raise self.retry(countdown=seconds, max_retries=0)
        if way == "replace":
            raise self.replace(rivals["skip"].si(n).set(countdown=seconds))
        raise self.retry(countdown=seconds)


class Slow(SingletonTask):
    """A task that takes its time between its retry and the release."""

    def on_retry(self, *args):
        time.sleep(1.5)


def define(name, **options):
    options = {"key": "{n}", "scope": "shared", "keep_on_retry": True, **options}
    return singleton_task(app=app, bind=True, name=f"retrying.{name}", **options)(retries)


keeps = define("keeps")
keeps_briefly = define("keeps_briefly", ttl=1)
keeps_queued = define("keeps_queued", on_conflict="queue")
keeps_once = define("keeps_once", once_per=60)
keeps_auto = define("keeps_auto", autoretry_for=(Again,), default_retry_delay=2)
keeps_full = define("keeps_full", on_conflict="queue", queue_limit=1, base=Slow)
keeps_raising = define("keeps_raising", on_conflict="raise", base=Slow)
lets_go = define("lets_go", keep_on_retry=False)


def once(self, n, gate=""):
    """A body of one run, which waits at its gate."""
    facts = {"task": self.name, "id": self.request.id, "n": n, "retries": self.request.retries}
    with history.recorded_body(facts, token=self.lease.token, lock=self.lease.name, held=self.lease.held):
        history.pass_gate(gate)
        return n


rivals = {
    policy: singleton_task(
        app=app,
        bind=True,
        name=f"retrying.{policy}",
        key="{n}",
        scope="shared",
        **{"on_conflict": "raise" if policy == "wait" else policy, **options},
    )(once)
    for policy, options in {
        "skip": {},
        "retry": {"retry_delay": 0.1, "retry_delay_max": 0.2},
        "queue": {},
        "wait": {"wait": 10},
        "raise": {},
    }.items()
}


@singleton_task(app=app, bind=True, name="retrying.calls", key=["n"])
def calls(self, n, gate="", end=""):
    """Called with options of the call's own."""
    request = self.request
    facts = {"task": self.name, "id": request.id, "n": n, "retries": request.retries}
    lease = self.lease
    with history.recorded_body(
        facts, token=lease.token, lock=lease.name, held=lease.held, ttl=getattr(lease, "ttl", None)
    ):
        if not request.retries:
            history.pass_gate(gate)
        if end.startswith("retry") and not request.retries:
            raise self.retry(countdown=0, headers={"x": "1"} if end == "retry with headers" else None)
        if end == "publish":
            return other.delay(n).id
        if end == "same":
            return calls.delay(f"{n}-same").id
        if end == "replace":
            raise self.replace(other.si(n))
        if end == "replace itself" and not request.replaced_task_nesting:
            raise self.replace(calls.si(n))
        if end == "fail":
            raise ValueError("as asked")
        return n


@singleton_task(app=app, bind=True, name="retrying.other", key=["n"])
def other(self, n):
    """Another task, called by a body."""
    lease = self.lease
    facts = {"task": self.name, "id": self.request.id, "n": n}
    history.note("in", token=lease.token, lock=lease.name, held=lease.held, **facts)
    history.note("out", **facts)
    return n


@app.task(name="retrying.plain")
def plain(*args):
    return list(args)


def headers(self):
    return self.request.headers


locked_headers = singleton_task(app=app, bind=True, name="retrying.locked_headers")(headers)
plain_headers = app.task(bind=True, name="retrying.plain_headers")(headers)
