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


def named(stage_row: tuple[str, Row]) -> str:
    return f"{stage_row[0]}: {stage_row[1].name}"


class Stages:
    """One stage per pool, made when first asked for, with the worker that runs its rows."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._stages: dict[str, WorkerEnvironment] = {}

    def __getitem__(self, pool: str) -> WorkerEnvironment:
        if pool not in self._stages:
            self._stages[pool] = self._stack.enter_context(running_environment(self._folder / pool, APP))
            self._run(pool)
        return self._stages[pool]

    def _run(self, pool: str) -> None:
        stage = self._stages[pool]
        stage.start("-Q", "inside", pool=pool, concurrency=4)
        sent = {row.name: stage.send(row, queue="inside") for row in rows_of(pool)}
        stage.mark("revoke, terminate", "start")
        stage.app.app.control.revoke(sent["revoke, terminate"].id, terminate=True)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    with ExitStack() as stack:
        yield Stages(tmp_path_factory.mktemp("pools"), stack)


def check(stage: WorkerEnvironment, pool: str, row: Row) -> None:
    seconds = stage.seconds_to_freedom(row)
    tell(pool, row.name, seconds)
    assert 0 <= seconds <= row.within, stage.words(row.name)


@pytest.mark.parametrize("case", ALL, ids=named)
def test_a_lock_is_free_within_a_second_of_the_end_of_its_body(stages: Stages, case: tuple[str, Row]) -> None:
    pool, row = case
    check(stages[pool], pool, row)


def endings_of(pool: str) -> list[tuple[str, Row, signal.Signals]]:
    return [
        ("warm", Row("warm shutdown", "early", "short", "return"), signal.SIGTERM),
        ("cold", Row("cold shutdown", "early", _way(COLD[pool]), COLD[pool]), signal.SIGQUIT),
        ("cold-late", Row("cold shutdown, late", "late", _way(COLD[pool]), COLD[pool]), signal.SIGQUIT),
        ("dead", Row("worker's SIGKILL", "early_brief", "beat", ""), signal.SIGKILL),
    ]


@pytest.mark.parametrize("pool", POOLS)
def test_a_lock_is_free_when_its_worker_ends(stages: Stages, pool: str) -> None:
    stage, endings = stages[pool], endings_of(pool)
    workers = [stage.start("-Q", queue, pool=pool, concurrency=1) for queue, _, _ in endings]
    for queue, row, _ in endings:
        stage.send(row, queue=queue)
    for worker, (_, row, number) in zip(workers, endings, strict=True):
        stage.wait_for_body(row)
        worker.signal(number)
    *survivors, (_, dead, _) = endings
    lives = stage.lives([dead], workers[-1])
    for _, row, _ in survivors:
        check(stage, pool, row)
    tell(pool, dead.name, stage.seconds_to_expiry(dead, lives, ttl=3.0))
