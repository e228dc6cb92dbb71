"""Workers of every pool with locks on five independent servers, of which one hangs and one dies."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType

import psutil
import pytest

from celery_dlock.store.redis.keys import LockKeys
from tests.conftest import WORKERS
from tests.support.apps.marks import marks_client
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.topologies import RedlockSet
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.support.apps.redlocked"
POOLS: Mapping[str, int] = {"prefork": 3, "threads": 3, "gevent": 3, "eventlet": 3, "solo": 1}
#: Seconds: more than two ttls.
LONG = 9.0


@dataclass
class Environment:
    five: RedlockSet
    tasks: ModuleType
    workers: Mapping[str, Worker]
    environ: Mapping[str, str]

    def marks(self, row: str) -> list[tuple[str, float, int]]:
        before = dict(os.environ)
        os.environ.update(self.environ)
        try:
            with marks_client() as client:
                return [tuple(json.loads(text)) for text in client.lrange(f"marks:{row}", 0, -1)]
        finally:
            os.environ.clear()
            os.environ.update(before)

    def holders(self, row: str) -> list[str | None]:
        key = LockKeys.of("dlock", self.tasks.work.lock_spec.name_of((row, 0), {})).lock
        found = []
        for node in self.five.nodes:
            if node.answering:
                with node.client() as client:
                    found.append(client.hget(key, "acq"))
        return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """One server hangs and one is dead from the middle of the first tasks on, until the end."""
    folder = tmp_path_factory.mktemp("redlocked")
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "server"))
        five = stack.enter_context(RedlockSet(folder / "five", nodes=5))
        urls = Urls(server.url(0), server.url(1), ",".join(five.lock_urls()))
        tasks = stack.enter_context(loaded_app(APP, urls))
        workers = {
            pool: stack.enter_context(
                running_worker(APP, "-Q", pool, folder=folder, urls=urls, pool=pool, concurrency=concurrency)
            )
            for pool, concurrency in POOLS.items()
        }
        yield Environment(five, tasks, workers, urls.environ())


@pytest.fixture(autouse=True)
def _show_logs(environment: Environment, request: pytest.FixtureRequest) -> None:
    request.node.stash[WORKERS] = list(environment.workers.values())


@pytest.fixture(scope="module")
def broken(environment: Environment) -> Mapping[str, object]:
    """A long task in each pool holds its lock when they break."""
    held = {pool: environment.tasks.work.apply_async((f"long-{pool}", LONG), queue=pool) for pool in POOLS}
    for pool in POOLS:
        eventually(lambda pool=pool: environment.marks(f"long-{pool}"), within=30)  # type: ignore[misc]
    environment.five.node(0).pause()
    environment.five.node(1).kill()
    return held


@pytest.mark.invariant("redlock-survives-a-minority")
@pytest.mark.parametrize("pool", POOLS)
def test_a_lease_lives_through_a_hung_and_a_dead_server(
    environment: Environment, broken: Mapping[str, object], pool: str
) -> None:
    assert broken[pool].get(timeout=60) > 0  # type: ignore[attr-defined]
    words = [word for word, _, _ in environment.marks(f"long-{pool}")]
    assert words == ["start", "return"]
    eventually(lambda: environment.holders(f"long-{pool}") == [None] * 3)


@pytest.mark.parametrize("pool", POOLS)
def test_bodies_of_one_name_run_one_at_a_time_and_all_of_them(
    environment: Environment, broken: Mapping[str, object], pool: str
) -> None:
    broken[pool].get(timeout=60)  # type: ignore[attr-defined]
    row = f"short-{pool}"
    results = [environment.tasks.work.apply_async((row, 0.05), queue=pool) for _ in range(6)]
    tokens = [result.get(timeout=60) for result in results]
    assert len(set(tokens)) == 6
    marks = sorted(environment.marks(row), key=lambda mark: mark[1])
    assert [word for word, _, _ in marks] == ["start", "return"] * 6


@pytest.mark.parametrize("pool", POOLS)
def test_its_threads_are_few(environment: Environment, broken: Mapping[str, object], pool: str) -> None:
    """Those that talk to servers end when there is nothing to say."""
    broken[pool].get(timeout=60)  # type: ignore[attr-defined]
    main = psutil.Process(environment.workers[pool].pid)
    children = main.children(recursive=True) if pool == "prefork" else []
    eventually(lambda: main.num_threads() <= 30 and all(child.num_threads() <= 12 for child in children), within=20)


@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_shutdown_does_not_wait_for_a_hung_server(
    environment: Environment, broken: Mapping[str, object], pool: str
) -> None:
    broken[pool].get(timeout=60)  # type: ignore[attr-defined]
    environment.tasks.work.apply_async((f"last-{pool}", 0.05), queue=pool).get(timeout=60)
    worker = environment.workers[pool]
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    try:
        assert worker.process.wait(20) == 0
    except subprocess.TimeoutExpired:
        worker.signal(signal.SIGUSR1)  # Celery writes into its log where it is
        worker.process.wait(5)
        raise
    assert time.monotonic() - began < 10
