"""Tasks that claim their name when they are published."""

import os

from celery_dlock import LockOptions, SingletonTask, singleton_task
from tests.support.apps.base import History, make_app

app = make_app(
    "claiming",
    configurable=True,
    broker_transport_options={"socket_connect_timeout": 1},
    worker_log_color=False,
    # so that messages wait in the worker
    worker_prefetch_multiplier=100,
)

history = History.of_environ()


def pass_gate(gate):
    if gate:
        history.rpush(f"at:{gate}", os.getpid())
        history.blpop(f"gate:{gate}", timeout=30)


def work(self, n, gate="", end=""):
    """`n` is its lock, `gate` what it waits for, `end` how its first run ends."""
    history.rpush(f"ran:{n}", self.request.id)
    if not self.request.retries:
        pass_gate(gate)
        if end == "fail":
            raise ValueError("as asked")
        if end == "retry":
            raise self.retry(countdown=1.5)
    return n


def named(name, **options):
    return singleton_task(app=app, bind=True, name=name, key=["n"], **options)(work)


def words(*given):
    """Its lock is the last word; what a canvas passes on comes before."""
    return given[-1]


queued = named("queued", unique="queued", on_conflict="retry", retry_delay=0.2, retry_delay_max=0.3)
skipping = named("skipping", unique="queued")
both = named("both", unique="queued+running", on_conflict="retry", retry_delay=0.2, retry_delay_max=0.3)
loud = named("loud", unique="queued+running", on_duplicate="raise")
parking = named("parking", unique="queued", on_conflict="queue")
unchecked = named("unchecked", unique="queued", on_store_error="run")
plain = named("plain")


@singleton_task(app=app, name="step", key=words, unique="queued")
def step(*given):
    history.rpush(f"ran:{given[-1]}", "step")
    return given[-1]


@singleton_task(app=app, name="loud_step", key=words, unique="queued", on_duplicate="raise")
def loud_step(*given):
    return given[-1]


class Nightly(SingletonTask):
    name = "nightly"
    lock_options = LockOptions(key=["n"], unique="queued")

    def run(self, n):
        return n


class UnclaimedNightly(Nightly):
    name = "unclaimed_nightly"
    lock_options = LockOptions(key=["n"])


nightly = app.register_task(Nightly())
unclaimed_nightly = app.register_task(UnclaimedNightly())


@app.task(name="busy")
def busy(gate):
    pass_gate(gate)
