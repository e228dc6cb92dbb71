"""Declared durability and quarantine, as tasks meet them in a worker."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import states
from celery.result import AsyncResult

from celery_dlock.errors import LockLost, StoreUnavailable
from tests.support.environ import environment_variables
from tests.support.polling import eventually
from tests.support.replicas import ReplicaSet
from tests.support.servers import Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.support.apps.durability"
#: Seconds for which an emptied server grants nothing new.
QUARANTINE = 3.0


class Environment:
    def __init__(self, locks: ReplicaSet, tasks: ModuleType, urls: Urls, worker: Worker) -> None:
        self.locks, self.tasks, self.urls, self.worker = locks, tasks, urls, worker
        self._rows = itertools.count()

    def send(self, name: str, row: str = "") -> "tuple[str, AsyncResult[Any]]":
        row = row or f"row-{next(self._rows)}"
        return row, getattr(self.tasks, name).delay(row)

    def starts(self, row: str) -> int:
        with redis.Redis.from_url(self.urls.result) as client:
            return int(client.llen(f"marks:{row}"))

    @contextmanager
    def nobody_confirms(self) -> Iterator[None]:
        (replica,) = self.locks.replicas
        replica.pause()
        yield
        replica.resume()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("durability")
    with ExitStack() as stack:
        broker = stack.enter_context(Server(folder / "broker"))
        locks = stack.enter_context(ReplicaSet(folder / "locks"))
        urls = Urls(broker.url(0), broker.url(1), locks.primary.url())
        stack.enter_context(environment_variables({"DLOCK_TEST_QUARANTINE": str(QUARANTINE)}))
        tasks = stack.enter_context(loaded_app(APP, urls))
        worker = stack.enter_context(running_worker(APP, folder=folder, urls=urls, concurrency=2))
        made = Environment(locks, tasks, urls, worker)
        in_office(made)
        yield made


def in_office(environment: Environment) -> None:
    """All buckets of the lock store grant."""

    def ran() -> bool:
        _, sent = environment.send("failing")
        return bool(sent.get(timeout=30, propagate=False) is True)

    eventually(lambda: all(ran() for _ in range(5)), within=60, every=0.2)


def error_of(sent: "AsyncResult[Any]") -> str:
    error = sent.get(timeout=30, propagate=False)
    assert (sent.state, isinstance(error, StoreUnavailable)) == (states.FAILURE, True), error
    return str(error)


@pytest.mark.invariant("unconfirmed-acquire-is-released")
def test_call_whose_lock_is_not_confirmed_fails_and_holds_nothing(environment: Environment) -> None:
    with environment.nobody_confirms():
        row, sent = environment.send("failing")
        assert error_of(sent) == "only 0 of 1 replicas confirmed within 0.8 s (dlock_durability={'replicas': 1})"
        assert environment.starts(row) == 0
    assert environment.send("failing", row)[1].get(timeout=30) is True, "what was taken was not given back"


def test_on_store_error_run_runs_without_the_lock(environment: Environment) -> None:
    with environment.nobody_confirms():
        assert environment.send("bypassing")[1].get(timeout=30) is False


def test_on_store_error_retry_is_republished_until_it_is_confirmed(environment: Environment) -> None:
    with environment.nobody_confirms():
        row, sent = environment.send("returning")
        environment.worker.wait_for_log(r"returning\[.*is republished, retrying in .* only 0 of 1 replicas confirmed")
    assert sent.get(timeout=60) is True
    assert environment.starts(row) == 1


def test_a_message_whose_parking_was_not_confirmed_runs_once(environment: Environment) -> None:
    """It is parked and republished, too. The republished copy finds that the message had its grant and has ended."""
    with environment.tasks.queueing.lock_for("twice"), environment.nobody_confirms():
        _, sent = environment.send("queueing", "twice")
        eventually(lambda: f"{sent.id}] is republished" in environment.worker.log(), within=30)
    assert sent.get(timeout=30) is True
    with redis.Redis.from_url(environment.urls.broker) as client:
        eventually(lambda: not client.llen("celery") and not client.hlen("unacked"), within=30)
    assert environment.starts("twice") == 1


def test_a_body_whose_renewals_are_not_confirmed_is_stopped_before_its_lease_is_over(environment: Environment) -> None:
    row, sent = environment.send("working")
    eventually(lambda: environment.starts(row) == 1, within=20)
    with environment.nobody_confirms():
        assert isinstance(sent.get(timeout=30, propagate=False), LockLost)
    environment.worker.wait_for_log(
        r"the lease of .*working.* is lost: no renewal was confirmed before its deadline: too few servers confirmed the"
    )


@pytest.mark.invariant("quarantine-delays-grants")
def test_emptied_store_starts_no_task_and_loses_none_until_its_quarantine_is_over(environment: Environment) -> None:
    """Under every policy; the error of "fail" says for how long."""
    environment.locks.primary.flush()
    _, failed = environment.send("failing")
    assert "grants nothing new for another" in error_of(failed)
    sent = [environment.send(name) for name in ("returning", "queueing", "queueing")]
    assert [result.get(timeout=60) for _, result in sent] == [True] * 3
    assert [environment.starts(row) for row, _ in sent] == [1] * 3
    in_office(environment)


@pytest.mark.invariant("quarantine-delays-grants")
def test_granted_waiter_takes_the_lock_when_the_quarantine_is_over(environment: Environment) -> None:
    """And not only in its next turn, which would be dlock_grant_timeout (60 s) later."""
    row = "turn"
    lock = environment.tasks.queueing.lock_for(row)
    assert lock.acquire(timeout=30)
    _, sent = environment.send("queueing", row)
    eventually(lambda: environment.tasks.queueing.waiting(row).count == 1, within=30)
    with redis.Redis.from_url(environment.urls.lock) as client:
        client.delete(*client.keys("dlock:*:quarantine"))
    lock.release()
    environment.worker.wait_for_log(r"queueing\[.*is republished, retrying in .* grants nothing new for another")
    assert sent.get(timeout=40) is True


def test_a_worker_does_not_start_where_no_disk_can_confirm(environment: Environment) -> None:
    names = {"BROKER": environment.urls.broker, "RESULT": environment.urls.result, "LOCK": environment.urls.lock}
    ours = {f"DLOCK_TEST_{name}_URL": url for name, url in names.items()}
    ended = subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, "worker", "-P", "solo"],
        env={**os.environ, **ours, "DLOCK_TEST_FSYNC": "yes"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert (
        "invalid dlock_durability={'fsync': 'local'}: the lock store cannot confirm that a write is on disk; "
        "expected Redis 7.2 or Valkey, with appendonly yes on every server"
    ) in ended.stderr
