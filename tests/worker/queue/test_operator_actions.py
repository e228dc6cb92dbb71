"""Real messages that an operator requeues or drops."""

from pathlib import Path
from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError

from celery_dlock.control import LockControl
from celery_dlock.store.model import Identity
from tests.conftest import WORKERS
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually
from tests.support.stores import name_in, store_at


def test_requeued_dead_letter_runs_and_dropped_ones_end_revoked(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with running_environment(tmp_path) as environment, LockControl(environment.app, user="alice") as control:
        request.node.stash[WORKERS] = environment.workers
        task, n = environment.tasks.parcel, environment.fresh()
        name = name_in(environment.keys(task, n))
        with environment.hold(task, n):
            again, given_up, waiter = (environment.park(task, n)[0] for _ in range(3))
            store = store_at(environment.app.conf.dlock_url, timeout=3)
            for result in (again, given_up):
                store.remove_waiter(name, Identity(result.id).digest, uuid4().hex, dead_letter=True)
            store.close()
            assert {letter.task_id for letter in control.dead_letters().items} == {again.id, given_up.id}
            assert control.requeue(name.text, Identity(again.id).digest)
            assert control.drop(name.text, Identity(given_up.id).digest, reason="too late")
            assert control.drop(name.text, Identity(waiter.id).digest)
            assert control.dead_letters().items == ()
        assert again.get(timeout=20) == n
        for result in (given_up, waiter):
            eventually(lambda result=result: result.state == "REVOKED", message="its end is not stored")
        with pytest.raises(TaskRevokedError, match=r"dropped by operator alice@.*: too late"):
            given_up.get(timeout=5)


def test_dropped_waiter_whose_end_is_stored_keeps_that_end(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """After the restore of an older store, a call that has ended waits again. Its followers may be running."""
    with running_environment(tmp_path) as environment, LockControl(environment.app) as control:
        request.node.stash[WORKERS] = environment.workers
        task, n = environment.tasks.parcel, environment.fresh()
        with environment.hold(task, n):
            (waiter,) = environment.park(task, n)
            task.backend.mark_as_failure(waiter.id, ValueError("it ended"))
            assert control.drop(task.lock_name(n), Identity(waiter.id).digest)
            assert control.waiting() == ()
            assert environment.state(waiter.id) == "FAILURE"
