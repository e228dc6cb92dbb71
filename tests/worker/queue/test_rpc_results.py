"""The `rpc://` result backend: the end of a call that never ran reaches its client, whichever process stores it."""

import json
import os
import subprocess
import sys
import time
from uuid import uuid4

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError

from celery_dlock import CallSkipped
from celery_dlock.control import LockControl
from celery_dlock.store.model import Identity
from tests.support.environments.queueing import APP, running_environment
from tests.support.polling import eventually
from tests.support.processes import ROOT
from tests.support.stores import name_in, store_at

RPC = {"result_backend": "rpc://"}
#: Seconds until a reply has come; a busy machine.
REPLY = 15


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("rpc"), conf=RPC) as made:
        made.environ = {**made.urls.environ(), "DLOCK_TEST_CONF": json.dumps(RPC)}
        yield made


def revoked(result, pattern, error=TaskRevokedError):
    with pytest.raises(error, match=pattern):
        result.get(timeout=REPLY)


@pytest.mark.invariant("no-result-hangs")
@pytest.mark.parametrize("name", ["early", "late"])
def test_parked_call_that_runs_returns_its_value_over_rpc(environment, tasks, name):
    task, n = getattr(tasks, name), environment.fresh()
    holding = environment.hold(task, n)
    (waiter,) = environment.park(task, n)
    assert holding.end() == waiter.get(timeout=REPLY) == n


@pytest.mark.invariant("no-result-hangs")
@pytest.mark.parametrize("name", ["early", "late"])
def test_waiter_that_expires_ends_revoked_over_rpc(environment, tasks, name):
    """The process that releases the lock stores the end."""
    task, n = getattr(tasks, name), environment.fresh()
    holding = environment.hold(task, n)
    waiters = [environment.park(task, n, expires=2)[0] for _ in range(2)]
    deadline = time.time() + 2.05
    eventually(lambda: time.time() > deadline)
    holding.let_go()
    for waiter in waiters:
        revoked(waiter, "expired while it waited")


@pytest.mark.invariant("removed-waiters-end-revoked")
def test_revoked_waiter_and_its_chain_end_over_rpc(environment, tasks):
    """The queue sweeper of the worker's main process stores the ends."""
    n = environment.fresh()
    with environment.hold(tasks.early, n):
        last = chain(tasks.early.si(n), tasks.plain.si(1), tasks.plain.si(2)).apply_async()
        environment.parked(tasks.early, n, last.parent.parent)
        environment.app.control.revoke(last.parent.parent.id)
        for result in (last.parent.parent, last.parent, last):
            revoked(result, "revoked while it waited")


@pytest.mark.invariant("no-result-hangs")
def test_evicted_waiter_ends_revoked_over_rpc(environment, tasks):
    """The pool child that parks the newer call stores the end."""
    n = environment.fresh()
    with environment.hold(tasks.latest, n):
        (older,) = environment.park(tasks.latest, n)
        tasks.latest.delay(n)
        revoked(older, "replaced by a newer call", CallSkipped)


@pytest.mark.invariant("no-result-hangs")
def test_skipped_chain_ends_over_rpc(environment, tasks):
    n = environment.fresh()
    with environment.hold(tasks.shared, n):
        last = chain(tasks.shared_skips.si(n), tasks.plain.si(1)).apply_async()
        for result in (last.parent, last):
            revoked(result, "held by", CallSkipped)


@pytest.mark.invariant("no-result-hangs")
def test_dropped_waiter_and_dead_letter_end_over_rpc(environment, tasks):
    """The operator's processes store the ends: a command, and one that uses ``LockControl``."""
    task, n = tasks.early, environment.fresh()
    with environment.hold(task, n), LockControl(environment.app, user="alice") as control:
        letter, waiter = (environment.park(task, n)[0] for _ in range(2))
        name = name_in(environment.keys(task, n))
        store = store_at(environment.app.conf.dlock_url, timeout=3)
        store.remove_waiter(name, Identity(letter.id).digest, uuid4().hex, dead_letter=True)
        store.close()
        assert control.drop(name.text, Identity(waiter.id).digest)
        revoked(waiter, "dropped by operator alice")
        run_command("dlock", "dead", "drop", f"{name.text}/{letter.id}", environ=environment.environ)
        revoked(letter, "dropped by operator")


def run_command(*words, environ):
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
