"""A lease that is lost while its body runs: the reports, their times, and what stops."""

import math
import random
import time
from collections.abc import Iterator

import pytest

from celery_dlock import LockLost
from tests.conftest import WORKERS
from tests.support.environments.losing import LosingEnvironment, ended, losing_environment
from tests.support.polling import eventually
from tests.support.workers import Worker

TTL = 2.0
#: Renewals are sent each third of the ttl, and the watchdog looks each 0.2 s; the rest is a loaded machine's.
REFUSED_WITHIN = TTL / 3 + 0.2 + 1.5
POOLS = ["prefork", "threads", "gevent", "eventlet"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LosingEnvironment]:
    with losing_environment(tmp_path_factory.mktemp("losing")) as environment:
        yield environment


@pytest.fixture
def environment(made: LosingEnvironment, request: pytest.FixtureRequest) -> Iterator[LosingEnvironment]:
    if "pool" in request.fixturenames:
        made.worker(request.getfixturevalue("pool"))
    request.node.stash[WORKERS] = list(made.workers.values())
    yield made
    made.store.resume()


@pytest.mark.parametrize("pool", POOLS)
class TestAbort:
    @pytest.mark.invariant("lost-lease-stops-its-body", "forgotten-lock-is-reported")
    def test_a_body_whose_lock_is_gone_from_the_store_is_stopped(
        self, environment: LosingEnvironment, pool: str
    ) -> None:
        body = environment.begin(pool, "aborts", 15)
        environment.locks.delete(body.key)
        gone = time.monotonic()
        error = ended(body)
        assert (type(error), body.result.state) == (LockLost, "FAILURE")
        assert environment.at(body.row, "LockLost") - gone <= REFUSED_WITHIN
        eventually(
            lambda: environment.lost(body) == ["the store no longer knows it"], message=f"{environment.lost(body)}"
        )

    @pytest.mark.invariant("lost-lease-stops-its-body", "silent-store-is-reported")
    def test_a_body_is_stopped_before_its_lease_ends_while_the_store_is_silent(
        self, environment: LosingEnvironment, pool: str
    ) -> None:
        assert left_at_the_word(environment, pool, "aborts") > 0

    @pytest.mark.invariant("lost-lease-stops-its-body", "caught-loss-is-raised-again")
    def test_body_that_catches_the_loss_meets_it_in_every_ensure_and_release_log(
        self, environment: LosingEnvironment, pool: str
    ) -> None:
        body = environment.begin(pool, "catches", 15)
        environment.locks.delete(body.key)
        assert ended(body) == ["lost", "lost", "lost"]
        eventually(
            lambda: environment.lost(body) == ["the store no longer knows it"], message=f"{environment.lost(body)}"
        )
        environment.worker(pool).wait_for_log(
            rf"work under {body.key.partition(':lock:')[2]} has ended; its lease was lost before"
        )

    @pytest.mark.invariant("autoretry-after-loss-runs-again")
    def test_autoretry_for_lock_lost_runs_the_stopped_body_again(
        self, environment: LosingEnvironment, pool: str
    ) -> None:
        body = environment.begin(pool, "again", 15)
        environment.locks.delete(body.key)
        assert ended(body) == [1]
        assert [word for word, _ in environment.words(body.row)] == ["start", "LockLost", "second"]

    def test_a_hung_body_is_stopped_when_max_hold_has_passed_and_the_next_one_runs(
        self, environment: LosingEnvironment, pool: str
    ) -> None:
        body = environment.begin(pool, "hung", 15)
        assert type(ended(body)) is LockLost
        assert 0.9 <= environment.at(body.row, "LockLost") - body.began <= 1.0 + 0.2 + 1.0
        eventually(lambda: environment.lost(body) == ["it was held for as long as max_hold allows"])
        assert environment.app.hung.apply_async((body.row, 0.1), queue=pool).get(timeout=10) == "done"

    @pytest.mark.invariant("lost-lease-stops-its-body", "abort-strikes-in-the-body")
    def test_the_exception_strikes_in_the_body_or_not_at_all(self, environment: LosingEnvironment, pool: str) -> None:
        """Bodies that end at about the moment at which they would be stopped: each ends as itself, or by LockLost."""
        worker, chance = environment.worker(pool), random.Random(7)
        rows = [environment.row() for _ in range(48)]
        results = [environment.app.hung.apply_async((row, chance.uniform(0.95, 1.35)), queue=pool) for row in rows]
        ends = [result.get(timeout=40, propagate=False) for result in results]
        assert {type(end) for end in ends} <= {str, LockLost}
        assert {type(end) for end in ends} == {str, LockLost}, "they did not end at about that moment"
        assert worker.running
        assert unexpected(worker) == ""


def unexpected(worker: Worker) -> str:
    """Return the errors in the worker's log, except those of lost leases."""
    return "\n".join(
        line
        for line in worker.log().splitlines()
        if ("ERROR" in line or "CRITICAL" in line) and "LockLost" not in line and "ensure" not in line
    )


@pytest.mark.invariant("solo-pool-stops-no-body")
def test_solo_pool_stops_no_body_and_its_worker_warns_at_start(environment: LosingEnvironment) -> None:
    """`ensure()` raises."""
    worker = environment.worker("solo")
    worker.wait_for_log(r"on_lost='abort' of .*losing.aborts.*only lease.ensure\(\) raises")
    body = environment.begin("solo", "aborts", 2.5)
    environment.locks.delete(body.key)
    assert ended(body) == "done"
    eventually(lambda: environment.lost(body) == ["the store no longer knows it"])
    asks = environment.begin("solo", "ensures", 15)
    environment.locks.delete(asks.key)
    assert (type(ended(asks)), asks.result.state) == (LockLost, "FAILURE")


def test_body_without_abort_continues_and_its_listeners_are_called(environment: LosingEnvironment) -> None:
    body = environment.begin("prefork", "goes_on", 2.0)
    environment.locks.delete(body.key)
    assert ended(body) == "done"
    eventually(lambda: environment.lost(body) == ["the store no longer knows it"])


@pytest.mark.invariant("late-release-frees-nothing")
def test_a_late_release_does_not_free_the_lock_of_the_next(environment: LosingEnvironment) -> None:
    body = environment.begin("prefork", "goes_on", 2.0)
    environment.locks.hset(body.key, "acq", "another.1")
    environment.locks.persist(body.key)
    assert ended(body) == "done"
    environment.worker("prefork").wait_for_log(
        rf"work under {body.key.partition(':lock:')[2]} has ended; its lease was lost"
    )
    assert environment.locks.hget(body.key, "acq") == "another.1"


@pytest.mark.invariant("silent-store-is-reported")
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_ensure_answers_by_the_leases_end_while_the_store_is_silent(environment: LosingEnvironment, pool: str) -> None:
    assert left_at_the_word(environment, pool, "ensures") > 0


def left_at_the_word(environment: LosingEnvironment, pool: str, task: str) -> float:
    """Seconds that a lease would still have lasted when its body learned of its loss, while the store was silent.

    The best of three: a holder that learns of it before the end needs a processor before then, for which 0.2 s are
    left. A machine that stands still takes that from one body, a broken invariant from each.
    """
    best = -math.inf
    for _ in range(3):
        body = environment.begin(pool, task, 15)
        # Just renewed, so that no renewal comes between this look and the pause.
        left_ms = eventually(lambda body=body: max(0, environment.locks.pttl(body.key) - 1600))
        ends = time.monotonic() + (1600 + left_ms) / 1000
        environment.store.pause()
        best = max(best, ends - environment.at(body.row, "LockLost"))
        environment.store.resume()
        assert (type(ended(body)), body.result.state) == (LockLost, "FAILURE")
        if best > 0:
            break
    return best
