"""The lock store is away, and each machine runs one body of a name (``on_store_error="local"``).

Workers with one run directory are on one machine; a worker with another one is on another machine.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import chain, states
from celery.result import AsyncResult

from celery_dlock.messaging.results import CallSkipped
from tests.support.polling import eventually
from tests.support.processes import ROOT
from tests.support.servers import Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.support.apps.faults_local"
HERE, BESIDE, ELSEWHERE = "here", "beside", "elsewhere"


class Environment:
    """Two workers on one machine, and one on another machine. Each has a queue of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        broker = stack.enter_context(Server(folder / "broker"))
        self.locks = stack.enter_context(Server(folder / "locks"))
        self.urls = Urls(broker.url(), broker.url(1), self.locks.lock_url())
        self.tasks: ModuleType = stack.enter_context(loaded_app(APP, self.urls))
        self.marks: redis.Redis = stack.enter_context(broker.client(1))
        self.workers = {
            HERE: self.start(HERE, "machine-1"),
            BESIDE: self.start(BESIDE, "machine-1"),
            ELSEWHERE: self.start(ELSEWHERE, "machine-2"),
        }
        self._rows = 0

    def start(self, queue: str, machine: str, pool: str = "prefork") -> Worker:
        conf = json.dumps({"dlock_run_dir": str(self.folder / machine)})
        return self._stack.enter_context(
            running_worker(
                APP, "-Q", queue, folder=self.folder, urls=self.urls, pool=pool, environ={"DLOCK_TEST_CONF": conf}
            )
        )

    def row(self) -> str:
        self._rows += 1
        return f"row-{self._rows}"

    def send(self, queue: str, name: str, row: str, gate: str = "") -> "AsyncResult[Any]":
        sent: AsyncResult[Any] = getattr(self.tasks, name).apply_async((row, gate), queue=queue)
        return sent

    def hold(self, queue: str, row: str, name: str = "skipping") -> "AsyncResult[Any]":
        """Send a call that runs until :meth:`open`."""
        count = self.words(row).count("start")
        sent = self.send(queue, name, row, f"gate:{row}")
        eventually(lambda: self.words(row).count("start") > count, within=20, message=f"{sent.id} does not start")
        return sent

    def open(self, row: str) -> None:
        self.marks.set(f"gate:{row}", 1)

    def end(self, result: "AsyncResult[Any]", within: float = 30.0) -> Any:
        return result.get(timeout=within, propagate=False)

    def lines(self, row: str) -> list[list[Any]]:
        texts: Any = self.marks.lrange(f"marks:{row}", 0, -1)
        return [json.loads(text) for text in texts]

    def words(self, row: str) -> list[str]:
        return [line[0] for line in self.lines(row)]

    def pid(self, row: str) -> int:
        """The process of the last body that started."""
        return int([line[2] for line in self.lines(row) if line[0] == "start"][-1])

    def files(self, machine: str = "machine-1") -> list[str]:
        return sorted(file.name for file in (self.folder / machine).iterdir())

    def wait_until_free(self) -> None:
        """Wait until no file is left. A result is stored a moment before its lock is released."""
        eventually(lambda: not self.files() and not self.files("machine-2"), message="a lock file is left")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    with ExitStack() as stack:
        yield Environment(tmp_path_factory.mktemp("store-down-local"), stack)


@pytest.fixture
def up(environment: Environment) -> Environment:
    if not environment.locks.running:
        environment.locks.start()
    environment.wait_until_free()
    return environment


@pytest.fixture
def down(environment: Environment) -> Environment:
    environment.locks.kill()
    environment.wait_until_free()
    return environment


def assert_skipped(environment: Environment, result: "AsyncResult[Any]") -> str:
    error = environment.end(result)
    assert (result.state, type(error)) == (states.REVOKED, CallSkipped)
    return str(error)


LOCAL, LEASED = [True, False, False], [False, True, True]


@pytest.mark.invariant("store-error-local-excludes", "nothing-runs-unlocked")
def test_without_a_store_the_calls_of_one_machine_exclude_each_other(down: Environment) -> None:
    row = down.row()
    name = down.tasks.skipping.lock_name(row)
    first = down.hold(HERE, row)
    worker = down.workers[HERE]
    worker.wait_for_log(rf"WARNING.*{first.id}\] holds its lock {name} on this machine only: the lock store did not")
    for queue in (HERE, BESIDE):
        reason = assert_skipped(down, down.send(queue, "skipping", row))
        holder = f"held by faults_local.skipping[{first.id}] on {worker.node} (by the lock file of this machine) since"
        assert holder in reason
    down.open(row)
    assert down.end(first) == LOCAL
    assert down.words(row) == ["start", "return"]
    assert down.words(f"bypassed {name}") == [f"faults_local.skipping {first.id} None local=True"]
    down.wait_until_free()
    assert down.end(down.send(BESIDE, "skipping", row)) == LOCAL


@pytest.mark.invariant("store-error-local-excludes")
def test_without_a_store_each_machine_runs_one_body(down: Environment) -> None:
    row = down.row()
    both = [down.hold(HERE, row), down.hold(ELSEWHERE, row)]
    for queue in (HERE, BESIDE, ELSEWHERE):
        assert_skipped(down, down.send(queue, "skipping", row))
    down.open(row)
    assert [down.end(result) for result in both] == [LOCAL, LOCAL]


def test_raise_without_a_store_fails_with_lock_held(down: Environment) -> None:
    row = down.row()
    first = down.hold(HERE, row)
    refused = down.send(BESIDE, "raising", row)
    error = down.end(refused)
    assert (refused.state, type(error).__name__) == (states.FAILURE, "LockHeld")
    assert f"held by faults_local.skipping[{first.id}]" in str(error)
    down.open(row)
    down.end(first)


@pytest.mark.parametrize("policy", ["retrying", "waiting"])
def test_retry_and_wait_without_a_store_run_after_the_holder(down: Environment, policy: str) -> None:
    row = down.row()
    first = down.hold(HERE, row)
    later = down.send(BESIDE, policy, row)
    if policy == "retrying":
        down.workers[BESIDE].wait_for_log(rf"{later.id}\] is republished, retrying in .* s: .*by the lock file")
    down.open(row)
    assert down.end(first) == LOCAL
    assert down.end(later) == LOCAL
    assert down.words(row) == ["start", "return"] * 2


@pytest.mark.invariant("store-error-local-excludes")
def test_burst_without_a_store_runs_one_body_after_the_other(down: Environment) -> None:
    row = down.row()
    down.open(row)
    calls = [down.send((HERE, BESIDE)[number % 2], "retrying", row, f"gate:{row}") for number in range(16)]
    assert [down.end(result) for result in calls] == [LOCAL] * 16
    assert down.words(row) == ["start", "return"] * 16


def test_next_step_of_a_chain_is_not_refused_by_its_predecessor(down: Environment) -> None:
    row = down.row()
    step = down.tasks.skipping.si(row).set(queue=HERE)
    last = chain(step, down.tasks.skipping.si(row).set(queue=BESIDE), step.clone())()
    assert down.end(last) == LOCAL
    assert down.words(row) == ["start", "return"] * 3


def test_nested_call_of_the_owner_enters_the_lock_file_again(down: Environment) -> None:
    row = down.row()
    assert down.end(down.tasks.nesting.apply_async((row,), queue=HERE)) == [True, [True]]
    down.wait_until_free()


@pytest.mark.invariant("killed-holder-frees-lock-file")
def test_killed_child_frees_its_name_at_once(down: Environment) -> None:
    row = down.row()
    down.hold(HERE, row)
    os.kill(down.pid(row), signal.SIGKILL)
    down.open(row)
    eventually(lambda: down.end(down.send(BESIDE, "skipping", row)) == LOCAL, within=10, message="the name is held")
    down.wait_until_free()


@pytest.mark.invariant("store-error-local-excludes")
def test_holder_from_before_the_outage_excludes_the_calls_of_its_machine(up: Environment) -> None:
    row = up.row()
    first = up.hold(HERE, row)
    up.locks.kill()
    assert_skipped(up, up.send(BESIDE, "skipping", row))
    assert up.end(up.send(ELSEWHERE, "skipping", row, "")) == LOCAL
    up.open(row)
    assert up.end(first)[:2] == [False, True]


@pytest.mark.invariant("store-error-local-excludes")
def test_holder_from_the_outage_excludes_the_calls_of_its_machine_afterwards(down: Environment) -> None:
    """Another machine does not see it: that body overlaps, as the docs say."""
    row = down.row()
    first = down.hold(HERE, row)
    down.locks.start()
    reason = assert_skipped(down, down.send(BESIDE, "skipping", row))
    assert "by the lock file of this machine" in reason
    with down.locks.client() as client:
        assert list(client.scan_iter("dlock:*:lock:*")) == []
    assert down.end(down.send(ELSEWHERE, "skipping", row)) == LEASED
    waiting = down.send(BESIDE, "waiting", row)
    down.open(row)
    assert down.end(first) == LOCAL
    assert down.end(waiting) == LEASED
    down.wait_until_free()
    assert down.end(down.send(HERE, "skipping", row)) == LEASED


def test_with_a_store_calls_take_lease_and_lock_file(up: Environment) -> None:
    row = up.row()
    first = up.hold(HERE, row)
    assert len(up.files()) == 1
    reason = assert_skipped(up, up.send(BESIDE, "skipping", row))
    assert "lock file" not in reason
    assert_skipped(up, up.send(ELSEWHERE, "skipping", row))
    up.open(row)
    assert up.end(first) == LEASED
    up.wait_until_free()
    assert up.words(f"bypassed {up.tasks.skipping.lock_name(row)}") == []


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_threads_and_greenlets_exclude_each_other_and_do_not_block(down: Environment, pool: str) -> None:
    """The call that waits would block the hub of gevent, and then the holder could not end."""
    row = down.row()
    down.start(pool, "machine-1", pool)
    first = down.hold(pool, row)
    waiting = down.send(pool, "waiting", row)
    assert_skipped(down, down.send(HERE, "skipping", row))
    assert down.end(down.tasks.plain.apply_async(queue=HERE)) == "plain"
    assert down.words(row) == ["start"]
    down.open(row)
    assert down.end(first) == LOCAL
    assert down.end(waiting) == LOCAL
    assert down.words(row) == ["start", "return"] * 2


@pytest.mark.invariant("run-directory-is-private", "unusable-setting-ends-the-worker")
def test_worker_with_an_unsafe_run_directory_does_not_start(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    facts = {
        **environment.urls.environ(),
        "DLOCK_TEST_CONF": json.dumps({"dlock_run_dir": str(tmp_path / "open")}),
        "PYTHONPATH": str(ROOT),
        "C_FORCE_ROOT": "1",
    }
    command = ["-W", "ignore", "-m", "celery", "-A", APP, "worker", "-P", "solo", "-f", str(tmp_path / "log")]
    done = subprocess.run([sys.executable, *command], env=os.environ | facts, timeout=60, check=False)
    assert done.returncode == os.EX_CONFIG
    assert (
        f"the worker does not start: on_store_error='local': the run directory {tmp_path / 'open'} is open to other "
        "users (mode 0777); make it mode 0700"
    ) in (tmp_path / "log").read_text()
