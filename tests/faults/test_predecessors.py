"""A worker that starts where one of its name died frees what that one held, and only when it is surely gone.

Real workers, one story: their ttl is 60 s, so a lock that is free within seconds was freed.
"""

import signal
import time
from dataclasses import dataclass, field

import psutil
import pytest

from celery_dlock.store.redis.keys import node_key
from tests.support.environments.worker import WorkerEnvironment, running_environment
from tests.support.polling import eventually
from tests.support.processes import kill_session
from tests.support.workers import Worker

APP = "tests.support.apps.faults_processes"
NODE = "same@host"
SOON = 1.5


@dataclass
class Story:
    """The events, by the monotonic clock; 0: it did not happen."""

    freed: dict[str, float] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    children: dict[str, int] = field(default_factory=dict)
    log: str = ""
    forgotten: bool = False


def looks() -> None:
    """Let the other worker look a few times; it looks each 0.2 s."""
    end = time.monotonic() + 1.0
    eventually(lambda: time.monotonic() > end, within=5, every=0.1)


def send(environment: WorkerEnvironment, task: str, row: str, name: str, queue: str) -> str:
    getattr(environment.app, task).apply_async((row, name), queue=queue)
    return environment.key(task, row, name)


def hold(environment: WorkerEnvironment, task: str, row: str, name: str, queue: str) -> int:
    """Start a body and wait until its worker has noted what it holds. The body's process."""
    key = send(environment, task, row, name, queue)
    start = environment.mark(row, "start")
    notes = node_key("dlock", NODE)
    in_note = f':{key.rpartition(":")[2]}"'
    eventually(lambda: in_note in str(environment.store_client.hvals(notes)), message=f"{row} is not noted")
    return start.pid


def both_live(environment: WorkerEnvironment, told: Story) -> tuple[Worker, Worker]:
    """The first holds one, the second two and three, and a call waits for one at the second."""
    freed = environment.log.freed
    first = environment.start("-Q", "first", node=NODE, environ={"DLOCK_TEST_OUTLIVE": "1"})
    told.children["one"] = hold(environment, "held", "one", "one", "first")
    first.signal(signal.SIGSTOP)
    second = environment.start("-Q", "second", pool="threads", concurrency=4, node=NODE)
    send(environment, "held", "one, next", "one", "second")
    hold(environment, "held", "two", "two", "second")
    hold(environment, "queued", "three", "three", "second")
    looks()
    one, two = (environment.key("held", name, name) for name in ("one", "two"))
    told.freed["while the first is stopped"] = freed(one)
    first.signal(signal.SIGCONT)
    looks()
    told.freed["while both live"] = freed(one) or freed(two)
    return first, second


def the_first_dies(environment: WorkerEnvironment, told: Story, first: Worker) -> None:
    """Its main process, and later its child."""
    one = environment.key("held", "one", "one")
    first.kill()
    looks()
    told.freed["while its child lives"] = environment.log.freed(one)
    told.began["the child dies"] = time.monotonic()
    psutil.Process(told.children["one"]).kill()
    told.freed["one"] = eventually(lambda: environment.log.freed(one), message="one is still locked")
    told.began["one, next"] = environment.mark("one, next", "start").at


def the_second_dies(environment: WorkerEnvironment, told: Story, second: Worker) -> None:
    """All its processes at once; then a third starts."""
    two = environment.key("held", "two", "two")
    send(environment, "queued", "three, next", "three", "second")
    eventually(lambda: environment.app.queued.waiting("", "three").count == 1, message="nobody waits for three")
    kill_session(second.process)
    send(environment, "held", "two, next", "two", "second")
    told.freed["while nobody looks"] = environment.log.freed(two)
    third = environment.start("-Q", "second", node=NODE)
    told.began["the third is ready"] = time.monotonic()
    told.freed["two"] = eventually(lambda: environment.log.freed(two), message="two is still locked")
    for row in ("two, next", "three, next"):
        told.began[row] = environment.mark(row, "start").at
        environment.marks_client.set(f"go:{row}", 1)
        environment.mark(row, "return")
    notes = node_key("dlock", NODE)
    told.forgotten = eventually(lambda: not environment.store_client.exists(notes), message="still noted")
    told.log = third.log()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    with running_environment(tmp_path_factory.mktemp("predecessors"), APP) as environment:
        told = Story()
        first, second = both_live(environment, told)
        the_first_dies(environment, told, first)
        the_second_dies(environment, told, second)
        return told


@pytest.mark.invariant("living-worker-is-not-recovered")
def test_a_stopped_predecessor_is_not_robbed(story: Story) -> None:
    assert story.freed["while the first is stopped"] == 0


@pytest.mark.invariant("living-worker-is-not-recovered")
def test_two_live_workers_of_one_name_do_not_free_each_others_locks(story: Story) -> None:
    assert story.freed["while both live"] == 0


def test_a_child_that_outlives_its_main_process_is_not_robbed(story: Story) -> None:
    assert story.freed["while its child lives"] == 0


def test_older_worker_frees_a_dead_workers_lock_when_its_last_process_is_gone(story: Story) -> None:
    assert 0 < story.freed["one"] - story.began["the child dies"] <= SOON
    assert story.began["one, next"] - story.freed["one"] <= 1.0


@pytest.mark.invariant("dead-owner-is-released")
def test_worker_that_starts_where_one_died_frees_its_locks_at_once(story: Story) -> None:
    """The next run begins."""
    assert story.freed["while nobody looks"] == 0
    assert story.freed["two"] - story.began["the third is ready"] <= SOON
    assert story.began["two, next"] - story.began["the third is ready"] <= 2 * SOON
    assert "is released: process" in story.log


def test_recovered_lock_is_granted_to_its_waiter(story: Story) -> None:
    assert story.began["three, next"] - story.began["the third is ready"] <= 2 * SOON


def test_crash_record_of_a_dead_or_idle_worker_is_deleted(story: Story) -> None:
    assert story.forgotten
