"""The lock store is away: what becomes of tasks, and what it costs a worker."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import states
from celery.result import AsyncResult

from celery_dlock.errors import StoreUnavailable
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import SCRIPTS
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.scripts import shas
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.support.apps.faults_store"
CONCURRENCY = 2


class Environment:
    def __init__(self, locks: Server, proxy: Proxy, tasks: ModuleType, worker: Worker, marks: redis.Redis) -> None:
        self.locks, self.proxy, self.tasks, self.worker, self.marks = locks, proxy, tasks, worker, marks
        self._rows = 0

    def row(self) -> str:
        self._rows += 1
        return f"row-{self._rows}"

    def send(self, name: str, *args: str) -> "AsyncResult[Any]":
        sent: AsyncResult[Any] = getattr(self.tasks, name).delay(*args)
        return sent

    def end(self, result: "AsyncResult[Any]", within: float = 30.0) -> Any:
        return result.get(timeout=within, propagate=False)

    def words(self, row: str) -> list[str]:
        texts: Any = self.marks.lrange(f"marks:{row}", 0, -1)
        return [json.loads(text)[0] for text in texts]

    def keys(self) -> list[Any]:
        with self.locks.client() as client:
            return list(client.scan_iter("dlock:*:lock:*"))

    def recover(self) -> None:
        """The store answers, and every child knows."""
        self.proxy.set_mode("pass")

        def answered() -> bool:
            return bool(self.end(self.send("failing", self.row())) == "ran")

        eventually(answered, within=30, every=0.2, message="the store is back, and is not asked")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """A worker that was started while its store did not answer."""
    folder = tmp_path_factory.mktemp("store-down")
    with ExitStack() as stack:
        broker = stack.enter_context(Server(folder / "broker"))
        locks = stack.enter_context(Server(folder / "locks", options=["--maxmemory-policy", "allkeys-lru"]))
        assert locks.port is not None
        proxy = stack.enter_context(Proxy(locks.port))
        urls = Urls(broker.url(), broker.url(1), proxy.url().replace("//", f"//{LOCK_USER}:{LOCK_PASSWORD}@"))
        tasks = stack.enter_context(loaded_app(APP, urls))
        marks = stack.enter_context(broker.client(1))
        proxy.set_mode("blackhole")
        worker = stack.enter_context(running_worker(APP, folder=folder, urls=urls, concurrency=CONCURRENCY))
        yield Environment(locks, proxy, tasks, worker, marks)


@pytest.fixture
def up(environment: Environment) -> Iterator[Environment]:
    environment.recover()
    yield environment
    environment.proxy.set_mode("pass")


# First of all, because the worker starts but once.


def test_a_worker_starts_and_works_while_its_store_does_not_answer_and_says_so_once(environment: Environment) -> None:
    assert environment.end(environment.send("plain"), 10) == "plain"
    place = re.escape(environment.proxy.url())
    environment.worker.wait_for_log(rf"INFO.*locks: {place}, prefix dlock\n")
    environment.worker.wait_for_log(rf"WARNING.*lock store {place} is unreachable, retrying every 2 s: ")
    environment.recover()
    environment.worker.wait_for_log(rf"INFO.*lock store {place} is reachable")
    assert environment.worker.log().count("is unreachable, retrying") == 1
    assert LOCK_PASSWORD not in environment.worker.log()


@pytest.mark.invariant("risky-configuration-is-reported")
def test_a_store_that_may_evict_or_forget_is_reported_once_when_it_answers(up: Environment) -> None:
    up.worker.wait_for_log(
        f"WARNING.*lock store {re.escape(up.proxy.url())} may drop locks when its memory is full: "
        "its maxmemory-policy is allkeys-lru; action required: set it to noeviction"
    )
    up.worker.wait_for_log("WARNING.*parked in a store that is not durable")
    assert up.worker.log().count("may drop locks") == 1
    assert up.worker.log().count("in a store that is not durable") == 1


# What the task wants


@pytest.mark.invariant("nothing-runs-unlocked", "store-error-retry-republishes")
@pytest.mark.parametrize("mode", ["refuse", "blackhole"])
def test_on_store_error_retry_is_republished_until_the_store_answers(up: Environment, mode: Any) -> None:
    row = up.row()
    up.proxy.set_mode(mode)
    result = up.send("retrying", row)
    up.worker.wait_for_log(rf"WARNING.*{result.id}\] is republished, retrying in .* s: .*the lock store ")
    assert result.state == states.PENDING
    up.proxy.set_mode("pass")
    assert up.end(result) == "ran"
    assert up.words(row) == ["start"]


@pytest.mark.invariant("store-error-fail-fails")
def test_on_store_error_fail_ends_failure_with_store_unavailable(up: Environment) -> None:
    row = up.row()
    up.proxy.set_mode("refuse")
    result = up.send("failing", row)
    error = up.end(result)
    assert (result.state, isinstance(error, StoreUnavailable)) == (states.FAILURE, True)
    assert str(error).startswith("the lock store did not answer: ")
    assert up.words(row) == []


@pytest.mark.invariant("nothing-runs-unlocked", "store-error-run-reports")
def test_on_store_error_run_runs_unlocked_and_reports_it_by_log_signal_and_lease(up: Environment) -> None:
    row = up.row()
    up.proxy.set_mode("refuse")
    result = up.send("bypassing", row)
    name = up.tasks.bypassing.lock_name(row)
    told = f"{name} is not held: the store did not answer, and this body runs without its lock"
    assert up.end(result) == [name, None, False, False, 0.0, 0, [told, told]]
    up.worker.wait_for_log(rf"WARNING.*{result.id}\] runs without its lock {name}: the lock store did not answer: ")
    assert up.words(f"bypassed {name}") == [f"{APP}.bypassing {result.id} None"]


def test_run_a_body_that_insists_on_its_lock_ends_with_lock_lost(up: Environment) -> None:
    row = up.row()
    up.proxy.set_mode("refuse")
    result = up.send("insisting", row)
    error = up.end(result)
    assert (result.state, type(error).__name__) == (states.FAILURE, "LockLost")
    assert up.words(row) == ["start"]


def test_run_an_acquire_whose_replies_are_lost_leaves_no_lock(up: Environment) -> None:
    row = up.row()
    keys = LockKeys.of("dlock", up.tasks.bypassing.lock_spec.name_of((row,), {}))
    up.proxy.set_mode("cut_reply", containing=shas(SCRIPTS["acquire"]))
    assert up.end(up.send("bypassing", row))[1] is None
    up.proxy.set_mode("pass")
    with up.locks.client() as client:
        assert client.keys(keys.last.replace("last", "tombstone:*")), "nothing was acquired: this run proved nothing"
        eventually(lambda: not client.exists(keys.lock), within=5, message="a stuck lock")


# What it costs


def asked(texts: list[str]) -> int:
    """Return how many of these failures waited for the store."""
    assert all(text.startswith(("the lock store did not answer", "the lock store was not asked")) for text in texts)
    return sum("was not asked" not in text for text in texts)


@pytest.mark.invariant("dead-store-costs-one-timeout", "main-process-answers")
def test_a_dead_store_costs_a_worker_one_timeout_and_not_one_for_each_task(up: Environment) -> None:
    up.proxy.set_mode("blackhole")
    first = up.send("failing", up.row())
    assert asked([str(up.end(first))]) == 1
    began = time.monotonic()
    rest = [up.send("failing", up.row()) for _ in range(6 * CONCURRENCY)]
    texts = [str(up.end(result)) for result in rest]
    assert time.monotonic() - began < up.tasks.BREAKER_RESET, "too slow a machine: this run proved nothing"
    assert asked(texts) == 0


def test_tasks_that_come_at_once_wait_for_one_timeout_together(up: Environment) -> None:
    up.proxy.set_mode("blackhole")
    texts = [str(up.end(result)) for result in [up.send("failing", up.row()) for _ in range(6 * CONCURRENCY)]]
    assert 1 <= asked(texts) <= CONCURRENCY


@pytest.mark.invariant("release-is-repeated")
def test_body_that_ends_does_not_wait_for_a_dead_store(up: Environment) -> None:
    """Its lock is free when the store is back."""
    row, gate = up.row(), up.row()
    held = up.send("holding", row, gate)
    eventually(lambda: up.words(row), within=20)
    up.proxy.set_mode("blackhole")
    assert asked([str(up.end(up.send("failing", up.row())))]) == 1
    up.marks.set(gate, 1)
    assert up.end(held) == "held"
    name = up.tasks.holding.lock_name(row, gate)
    up.worker.wait_for_log(f"could not release {name}, the watchdog will retry it: the lock store was not asked")
    # The child that had waited told the other one.
    assert len(up.keys()) == 1
    up.proxy.set_mode("pass")
    eventually(lambda: not up.keys(), within=10, message="a stuck lock")
    assert "is lost" not in up.worker.log()


@pytest.mark.invariant("main-process-answers")
def test_the_main_process_answers_while_the_store_does_not(up: Environment) -> None:
    up.proxy.set_mode("blackhole")
    waiting = [up.send("failing", up.row()) for _ in range(CONCURRENCY)]
    began = time.monotonic()
    pong = up.tasks.app.control.ping(destination=[up.worker.node], timeout=up.tasks.TIMEOUT * 0.8)
    assert [list(reply) for reply in pong] == [[up.worker.node]]
    assert time.monotonic() - began < up.tasks.TIMEOUT + 0.5
    for result in waiting:
        up.end(result)
