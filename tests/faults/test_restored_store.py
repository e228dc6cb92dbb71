"""The lock store is restored from an older snapshot: the losses of the guarantees, and the advice of the docs."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from celery_dlock.control import LockControl
from tests.conftest import WORKERS
from tests.support.environments import queueing
from tests.support.environments.queueing import QueueEnvironment
from tests.support.polling import eventually
from tests.support.processes import HOST, ROOT
from tests.support.servers import LOCK_PASSWORD, OPERATOR_USER
from tests.support.workers import running_worker

PAGE = ROOT / "docs/how-to/survive-a-failover.md"
CONF = {"dlock_ttl": 2}


class Restored:
    """A queue that changes after its snapshot: `ended` waited then and ends, `later` is parked."""

    def __init__(self, environment: QueueEnvironment, folder: Path) -> None:
        self.environment, self.folder = environment, folder
        self.task, self.n = environment.tasks.parcel, environment.fresh()
        first = environment.hold(self.task, self.n)
        (self.ended,) = environment.park(self.task, self.n)
        self.take_snapshot()
        first.end()
        self.ended.get(timeout=20)
        self.holding = environment.hold(self.task, self.n)
        (self.later,) = environment.park(self.task, self.n)

    @property
    def data(self) -> Path:
        return Path(self.environment.lock_server.folder / "appendonlydir")

    def take_snapshot(self) -> None:
        shutil.copytree(self.data, self.folder / "snapshot")

    def restore(self) -> None:
        self.environment.lock_server.stop()
        shutil.rmtree(self.data)
        shutil.copytree(self.folder / "snapshot", self.data)
        self.environment.lock_server.start()

    def stop_workers(self) -> None:
        """Stop the worker, whose calls end first."""
        self.holding.let_go()
        self.environment.entered(id=self.later.id)
        self.environment.worker.stop()

    @contextmanager
    def control(self) -> Iterator[LockControl]:
        url = f"redis://{OPERATOR_USER}:{LOCK_PASSWORD}@{HOST}:{self.environment.lock_server.port}/2"
        app = Celery("operator", broker=self.environment.urls.broker, set_as_current=False)
        app.conf.update(CONF, dlock_url=url)
        with LockControl(app) as made:
            yield made

    def runs(self, result: Any) -> int:
        return len(self.environment.history(what="in", id=result.id))


@pytest.fixture
def restored(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Restored]:
    with queueing.running_environment(tmp_path, separate=True, conf=CONF) as environment:
        request.node.stash[WORKERS] = environment.workers
        yield Restored(environment, tmp_path)


def recipe() -> Callable[[Celery], None]:
    """Return the function of the page."""
    examples = Sybil(parsers=[PythonCodeBlockParser()]).parse(PAGE).examples()
    (block,) = [block for block in (str(example.parsed) for example in examples) if "def drop_ended" in block]
    found: dict[str, Any] = {}
    exec(block, found)
    drop_ended: Callable[[Celery], None] = found["drop_ended"]
    return drop_ended


@pytest.mark.invariant("restored-snapshot-is-that-moment")
def test_restored_snapshot_runs_an_ended_call_again_and_forgets_a_later_one(restored: Restored) -> None:
    """A hold is in the store too, so one that was made before the restore is gone."""
    environment = restored.environment
    with restored.control() as control:
        control.hold(restored.task.lock_name(restored.n), 3600, "a restore")
    restored.restore()
    environment.entered(30, 2, id=restored.ended.id)
    assert environment.waiters(restored.task, restored.n) == []
    assert (restored.runs(restored.later), environment.state(restored.later.id)) == (0, "QUEUED")
    with restored.control() as control:
        assert control.waiting() == ()
    restored.holding.let_go()


@pytest.mark.invariant("restored-snapshot-is-that-moment")
def test_ended_call_that_is_dropped_before_workers_start_does_not_run_again(restored: Restored) -> None:
    environment = restored.environment
    restored.stop_workers()
    restored.restore()
    with restored.control() as control:
        assert [waiter.task_id for waiter in control.waiting()] == [restored.ended.id]
        environment.app.conf.dlock_url = control._app.conf.dlock_url
        recipe()(environment.app)
        assert control.waiting() == ()
        # The lock of the snapshot is that of a call that has ended. A hold begins when this lease is over.
        name = restored.task.lock_name(restored.n)
        eventually(lambda: control.lock(name).holder is None)
        assert control.hold(name, 3600, "a restore")
        new = restored.task.delay(restored.n)
        with running_worker(
            queueing.APP, folder=environment.folder, urls=environment.urls,
            environ={"DLOCK_TEST_CONF": json.dumps(CONF)},
        ) as worker:  # fmt: skip
            environment.workers.append(worker)
            eventually(lambda: [waiter.task_id for waiter in control.waiting()] == [new.id], 20)
            assert control.unhold(name)
            assert new.get(timeout=20) == restored.n
    assert (restored.runs(restored.ended), environment.state(restored.ended.id)) == (1, "SUCCESS")
