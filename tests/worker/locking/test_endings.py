"""However a body ends in the prefork pool, its lock is free within 1 s; only the death of the worker takes the ttl.

The ttl is 60 s in all rows but that one, so a lock that is free within seconds was released. `pytest -rP` shows the
seconds of each row.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from celery import Task

from tests.support.environments.worker import Row, WorkerEnvironment, running_environment, tell
from tests.support.workers import Worker

APP = "tests.support.apps.endings"
LOST = "onnection to broker lost|Unrecoverable error"

# From Celery's acceptance on: time enough for a fresh child to connect and begin.
SOFT, HARD = {"soft_time_limit": 2}, {"time_limit": 2}
INSIDE = [
    Row("success", "early", "success", "return"),
    Row("success, late", "late", "success", "return"),
    Row("exception", "early", "fail", "ValueError"),
    Row("exception, late", "late", "fail", "ValueError"),
    Row("self.retry", "early", "retry", "Retry"),
    Row("self.retry, late", "late", "retry", "Retry"),
    Row("Ignore", "early", "ignore", "Ignore"),
    Row("Ignore, late", "late", "ignore", "Ignore"),
    Row("Reject", "early", "reject", "Reject"),
    Row("Reject, late", "late", "reject", "Reject"),
    Row("Reject and requeue", "early", "requeue", "Reject"),
    Row("Reject and requeue, late", "late", "requeue", "Reject"),
    Row("replace", "early", "replace", "SelfReplaced"),
    Row("replace, late", "late", "replace", "SelfReplaced"),
    Row("soft limit", "early", "sleep", "SoftTimeLimitExceeded", SOFT),
    Row("soft limit, late", "late", "sleep", "SoftTimeLimitExceeded", SOFT),
    Row("soft limit, caught", "early", "caught", "return", SOFT),
    Row("soft limit in before_start", "slow_before", "", "SoftTimeLimitExceeded", SOFT),
    Row("soft limit in after_return", "slow_after", "", "SoftTimeLimitExceeded", SOFT),
    Row("hard limit", "early", "beat", "", HARD),
    Row("hard limit, deaf to SIGTERM", "early", "deaf", "", HARD),
    Row("hard limit, late", "late", "deaf", "", HARD),
    Row("revoke, SIGTERM", "early", "sleep", "SystemExit"),
    Row("revoke, SIGTERM, late", "late", "sleep", "SystemExit"),
    Row("revoke, SIGKILL", "early", "beat", ""),
    Row("revoke, SIGKILL, late", "late", "beat", ""),
    Row("os._exit", "early", "os._exit", "died"),
    Row("os._exit, late", "late", "os._exit", "died"),
    Row("SIGKILL", "early", "kill", "died"),
    Row("SIGKILL, late", "late", "kill", "died"),
    Row("segfault", "early", "segfault", "died"),
    Row("sys.exit", "early", "sys.exit", "SystemExit"),
    Row("child lost, reject_on_worker_lost", "rejected_when_lost", "os._exit", "died"),
]
if hasattr(Task, "retry_on_worker_lost"):
    INSIDE.append(Row("child lost, retry_on_worker_lost", "retried_when_lost", "os._exit", "died"))

WARM = [Row("warm shutdown", "early", "short", "return"), Row("warm shutdown, late", "late", "short", "return")]
COLD = [Row("cold shutdown", "early", "sleep", "SystemExit"), Row("cold shutdown, late", "late", "sleep", "SystemExit")]
# A dead worker releases nothing: there the ttl, 3 s, is the bound.
DEAD = [Row("worker's SIGKILL", "early_brief", "beat", ""), Row("worker's SIGKILL, late", "late_brief", "beat", "")]
CUT = [
    Row("broker connections dropped", "early", "short", "return"),
    Row("broker connections dropped, late", "late", "short", "return"),
]
CANCELLED = Row("broker connections dropped, late, cancelled", "late", "sleep at first", "SystemExit")
DOWN = Row("broker killed and back", "early", "long", "return", {"queue": "early"})
DOWN_LATE = Row("broker killed and back, late", "late", "long", "return", {"queue": "late"})


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEnvironment]:
    with running_environment(tmp_path_factory.mktemp("endings"), APP) as running:
        yield running


@pytest.fixture(scope="module")
def inside(environment: WorkerEnvironment) -> None:
    """All rows that a worker survives, in one worker: many at once, but for those that cost it a child.

    A child that starts takes a fifth of a second of CPU: several would keep the watchdog from its core.
    """
    environment.start("-Q", "inside", concurrency=6)
    for row in INSIDE:
        if not deadly(row):
            environment.send(row, queue="inside")
    for row in filter(deadly, INSIDE):
        sent = environment.send(row, queue="inside")
        environment.wait_for_body(row)
        if row.name.startswith("revoke"):
            number = "SIGTERM" if "SIGTERM" in row.name else "SIGKILL"
            environment.app.app.control.revoke(sent.id, terminate=True, signal=number)
        environment.seconds_to_freedom(row)


def deadly(row: Row) -> bool:
    """Does its child die?"""
    return row.end in {"died", ""} or row.options == HARD or row.name.startswith("revoke")


def check(environment: WorkerEnvironment, row: Row) -> None:
    seconds = environment.seconds_to_freedom(row)
    tell("prefork", row.name, seconds)
    assert 0 <= seconds <= row.within, environment.words(row.name)


@pytest.mark.invariant("release-at-every-ending", "dead-owner-is-released")
@pytest.mark.core
@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("row", INSIDE, ids=lambda row: row.name)
def test_a_lock_is_free_within_a_second_of_the_end_of_its_body(environment: WorkerEnvironment, row: Row) -> None:
    check(environment, row)


@pytest.mark.invariant("release-at-every-ending", "hard-limit-frees-after-death")
@pytest.mark.core
def test_after_a_hard_limit_the_next_body_starts_only_when_the_first_is_dead(environment: WorkerEnvironment) -> None:
    environment.start("-Q", "limits", concurrency=2)
    queueing = environment.app.queueing
    queueing.apply_async(("x", "deaf", "first"), queue="limits", **HARD)
    environment.mark("first", "start")
    queueing.apply_async(("x", "success", "second"), queue="limits")
    started = environment.mark("second", "start").at
    last_beat = environment.beat("first")
    tell("prefork", "hard limit, until the next body starts", started - last_beat)
    # Celery's own after_return runs in the main process 0.1 s and more before the body is dead.
    assert 0 < started - last_beat <= 1.5


def test_only_the_release_for_a_dead_child_is_logged_by_the_main_process(environment: WorkerEnvironment) -> None:
    """The operator learns from the log that the lock is free. A child that lives releases its locks silently."""
    worker = environment.start("-Q", "logged", concurrency=1)
    for row in (Row("logged, success", "early", "success", "return"), Row("logged, SIGKILL", "early", "kill", "died")):
        environment.send(row, queue="logged")
        environment.seconds_to_freedom(row)
    worker.wait_for_log(r"is released: pool child \d+ held it and has ended")
    assert worker.log().count("is released: ") == 1


def test_children_that_run_one_task_each_leave_no_lock(environment: WorkerEnvironment) -> None:
    environment.start("-Q", "one", "--max-tasks-per-child", "1", concurrency=2)
    rows = [Row(f"max_tasks_per_child=1, {number}", "early", "success", "return") for number in range(4)]
    for row in rows:
        environment.send(row, queue="one")
    for row in rows:
        check(environment, row)


def send_and_wait_for_start(environment: WorkerEnvironment, rows: list[Row], **options: object) -> None:
    for row in rows:
        environment.send(row, **options)
    for row in rows:
        environment.wait_for_body(row)


@pytest.fixture(scope="module")
def shut_down(environment: WorkerEnvironment) -> Mapping[str, int]:
    """Three workers with two bodies each; then all three end in their ways at once. How long the dead's locks live."""
    endings = {"warm": (WARM, signal.SIGTERM), "cold": (COLD, signal.SIGQUIT), "dead": (DEAD, signal.SIGKILL)}
    workers = {name: environment.start("-Q", name) for name in endings}
    for name, (rows, _) in endings.items():
        for row in rows:
            environment.send(row, queue=name)
    for name, (rows, number) in endings.items():
        for row in rows:
            environment.wait_for_body(row)
        workers[name].signal(number)
    return environment.lives(DEAD, workers["dead"])


@pytest.mark.invariant("dead-owner-is-released", "shutdown-keeps-locks")
@pytest.mark.usefixtures("shut_down")
@pytest.mark.parametrize("row", [*WARM, *COLD], ids=lambda row: row.name)
def test_a_lock_is_free_when_its_worker_ends(environment: WorkerEnvironment, row: Row) -> None:
    check(environment, row)


@pytest.mark.invariant("dead-owner-is-released")
def test_sigterm_to_all_processes_of_a_worker_ends_it_and_frees_its_locks(environment: WorkerEnvironment) -> None:
    """As systemd sends it by default. One child runs a body, the other is idle."""
    worker = environment.start("-Q", "all")
    row = Row("SIGTERM to all processes", "early", "sleep", "SystemExit")
    environment.send(row, queue="all")
    environment.wait_for_body(row)
    os.killpg(worker.pid, signal.SIGTERM)
    check(environment, row)
    assert worker.process.wait(30) == 0


@pytest.mark.parametrize("row", DEAD, ids=lambda row: row.name)
def test_a_lock_is_free_within_its_ttl_when_its_worker_dies(
    environment: WorkerEnvironment, shut_down: Mapping[str, int], row: Row
) -> None:
    tell("prefork", row.name, environment.seconds_to_expiry(row, shut_down, ttl=3.0))


def drop_connections(environment: WorkerEnvironment, worker: Worker) -> None:
    with environment.broker.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
        client.client_kill_filter(_type="pubsub", skipme=True)
    worker.wait_for_log(LOST)


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEnvironment]:
    """The connections to the broker are dropped while two bodies run."""
    with running_environment(tmp_path_factory.mktemp("cut"), APP) as environment:
        worker = environment.start()
        send_and_wait_for_start(environment, CUT)
        drop_connections(environment, worker)
        yield environment


@pytest.mark.parametrize("row", CUT, ids=lambda row: row.name)
def test_a_lock_is_free_when_the_body_ends_after_its_worker_lost_its_connections(
    cut_off: WorkerEnvironment, row: Row
) -> None:
    check(cut_off, row)
    # The broker delivers the unacknowledged message again at once; its copy must not start beside the first.
    assert cut_off.words(row.name) == ["start", "return"]


def test_a_lock_is_free_when_its_worker_lost_its_connections_and_cancels_the_body(tmp_path: Path) -> None:
    with running_environment(tmp_path, APP) as environment:
        worker = environment.start(environ={"DLOCK_TEST_CANCEL": "1"})
        send_and_wait_for_start(environment, [CANCELLED])
        drop_connections(environment, worker)
        check(environment, CANCELLED)
        # The message is delivered again, and its new run gets the lock.
        environment.mark(CANCELLED.name, "return")


@pytest.fixture(scope="module")
def broker_killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerEnvironment]:
    """The broker dies and restarts while two bodies run, each in a worker of its own."""
    with running_environment(tmp_path_factory.mktemp("down"), APP) as environment:
        workers = [environment.start("-Q", queue, concurrency=1) for queue in ("early", "late")]
        send_and_wait_for_start(environment, [DOWN, DOWN_LATE])
        environment.broker.kill()
        for worker in workers:
            worker.wait_for_log(LOST)
        environment.broker.start()
        yield environment


@pytest.mark.parametrize("row", [DOWN, DOWN_LATE], ids=lambda row: row.name)
def test_a_lock_is_free_when_the_body_ends_after_its_broker_died_and_came_back(
    broker_killed: WorkerEnvironment, row: Row
) -> None:
    check(broker_killed, row)
