"""However a body ends in the other pools, its lock is free within 1 s; only the death of the worker takes the ttl.

Where a pool ignores a limit or a revocation, the body goes on, and its lock is held until its own end.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.environments.worker import Row, WorkerEnvironment, running_environment, tell

APP = "tests.support.apps.endings"
POOLS = ["threads", "solo", "gevent", "eventlet"]
GREEN = ["gevent", "eventlet"]

INSIDE = [
    Row("success", "early", "success", "return"),
    Row("exception", "early", "fail", "ValueError"),
    Row("self.retry", "early", "retry", "Retry"),
    Row("Ignore", "early", "ignore", "Ignore"),
    Row("Reject", "early", "reject", "Reject"),
    Row("Reject and requeue", "early", "requeue", "Reject"),
    Row("Reject and requeue, late", "late", "requeue", "Reject"),
    Row("replace", "early", "replace", "SelfReplaced"),
    Row("soft limit, ignored", "early", "short", "return", {"soft_time_limit": 1}),
]
#: How each pool's body ends, where the pools differ (celery-facts A3).
HARD = dict.fromkeys(POOLS, "return") | {"gevent": "Timeout"}
REVOKED = dict.fromkeys(POOLS, "return") | dict.fromkeys(GREEN, "GreenletExit")
COLD = {"threads": "return", "solo": "NotImplementedError"} | dict.fromkeys(GREEN, "GreenletExit")


def _way(end: str) -> str:
    """A body that is killed where it sleeps may not come to its own end before."""
    return "sleep" if end in {"GreenletExit", "Timeout"} else "short"


def rows_of(pool: str) -> list[Row]:
    """The endings that a worker of that pool survives."""
    hard = Row("hard limit", "early", _way(HARD[pool]), HARD[pool], {"time_limit": 2})
    return [*INSIDE, hard, Row("revoke, terminate", "early", _way(REVOKED[pool]), REVOKED[pool])]


ALL = [(pool, row) for pool in POOLS for row in rows_of(pool)]


def named(environment_row: tuple[str, Row]) -> str:
    return f"{environment_row[0]}: {environment_row[1].name}"


class Environments:
    """One environment per pool, made when first asked for, with the worker that runs its rows."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._environments: dict[str, WorkerEnvironment] = {}

    def __getitem__(self, pool: str) -> WorkerEnvironment:
        if pool not in self._environments:
            self._environments[pool] = self._stack.enter_context(running_environment(self._folder / pool, APP))
            self._run(pool)
        return self._environments[pool]

    def _run(self, pool: str) -> None:
        environment = self._environments[pool]
        environment.start("-Q", "inside", pool=pool, concurrency=4)
        sent = {row.name: environment.send(row, queue="inside") for row in rows_of(pool)}
        environment.mark("revoke, terminate", "start")
        environment.app.app.control.revoke(sent["revoke, terminate"].id, terminate=True)


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environments]:
    with ExitStack() as stack:
        yield Environments(tmp_path_factory.mktemp("pools"), stack)


def check(environment: WorkerEnvironment, pool: str, row: Row) -> None:
    seconds = environment.seconds_to_freedom(row)
    tell(pool, row.name, seconds)
    assert 0 <= seconds <= row.within, environment.words(row.name)


@pytest.mark.parametrize("case", ALL, ids=named)
def test_a_lock_is_free_within_a_second_of_the_end_of_its_body(
    environments: Environments, case: tuple[str, Row]
) -> None:
    pool, row = case
    check(environments[pool], pool, row)


def endings_of(pool: str) -> list[tuple[str, Row, signal.Signals]]:
    return [
        ("warm", Row("warm shutdown", "early", "short", "return"), signal.SIGTERM),
        ("cold", Row("cold shutdown", "early", _way(COLD[pool]), COLD[pool]), signal.SIGQUIT),
        ("cold-late", Row("cold shutdown, late", "late", _way(COLD[pool]), COLD[pool]), signal.SIGQUIT),
        ("dead", Row("worker's SIGKILL", "early_brief", "beat", ""), signal.SIGKILL),
    ]


@pytest.mark.parametrize("pool", POOLS)
def test_a_lock_is_free_when_its_worker_ends(environments: Environments, pool: str) -> None:
    environment, endings = environments[pool], endings_of(pool)
    workers = [environment.start("-Q", queue, pool=pool, concurrency=1) for queue, _, _ in endings]
    for queue, row, _ in endings:
        environment.send(row, queue=queue)
    for worker, (_, row, number) in zip(workers, endings, strict=True):
        environment.wait_for_body(row)
        worker.signal(number)
    *survivors, (_, dead, _) = endings
    lives = environment.lives([dead], workers[-1])
    for _, row, _ in survivors:
        check(environment, pool, row)
    tell(pool, dead.name, environment.seconds_to_expiry(dead, lives, ttl=3.0))
