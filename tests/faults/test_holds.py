"""`min_hold` keeps a lock for at least so long, `max_hold` for at most so long, whatever the body does."""

import itertools
import time
from collections.abc import Iterator

import pytest
from celery.exceptions import TaskRevokedError

from tests.conftest import WORKERS
from tests.support.environments.losing import LosingEnvironment, ended, losing_environment
from tests.support.polling import eventually

TTL, KEPT = 2.0, 1.5
#: Seconds more on a loaded machine. Never less: by the store's own clock.
LATE = 1.5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LosingEnvironment]:
    with losing_environment(tmp_path_factory.mktemp("holds")) as environment:
        yield environment


@pytest.fixture
def environment(made: LosingEnvironment, request: pytest.FixtureRequest) -> LosingEnvironment:
    made.worker("prefork")
    request.node.stash[WORKERS] = list(made.workers.values())
    return made


def freed(environment: LosingEnvironment, key: str) -> float:
    """Return the time when the lock is free."""
    eventually(lambda: not environment.locks.exists(key), 20)
    return time.monotonic()


@pytest.mark.invariant("hold-times-are-kept")
@pytest.mark.parametrize("end", ["", "fail", "die"])
def test_a_lock_is_kept_for_min_hold_after_it_was_taken_however_its_body_ends(
    environment: LosingEnvironment, end: str
) -> None:
    body = environment.begin("prefork", "kept", end)
    token = environment.locks.hget(body.key, "token")
    assert token, "it is not kept"
    freed(environment, body.key)
    assert KEPT <= time.time() - int(token) / 1e6 <= KEPT + LATE


def test_call_at_a_kept_lock_reads_that_its_holder_has_ended(environment: LosingEnvironment) -> None:
    body = environment.begin("prefork", "kept")
    assert ended(body) == "done"
    with pytest.raises(TaskRevokedError, match=rf"{body.result.id}\] on .* \(ended; kept by min_hold\) since"):
        environment.app.kept.apply_async((body.row,), queue="prefork").get(timeout=10)
    freed(environment, body.key)
    assert environment.app.kept.apply_async((body.row,), queue="prefork").get(timeout=10) == "done"


def test_a_lock_that_was_held_for_longer_is_free_at_its_release(environment: LosingEnvironment) -> None:
    body = environment.begin("prefork", "kept_long", 2.0)
    end = environment.at(body.row, "return")
    assert freed(environment, body.key) - end <= 1.0


def test_waiters_run_in_order_each_min_hold_after_the_last_began(environment: LosingEnvironment) -> None:
    row = environment.row()
    results = [environment.app.kept_in_order.apply_async((row, number), queue="prefork") for number in range(3)]
    tokens = [result.get(timeout=30) for result in results]
    assert [word for word, _ in environment.words(row)] == ["0", "1", "2"]
    assert all((later - sooner) / 1e6 >= KEPT for sooner, later in itertools.pairwise(tokens))


def test_a_blocked_waiter_gets_the_lock_when_min_hold_has_passed(environment: LosingEnvironment) -> None:
    body = environment.begin("prefork", "kept_and_waits")
    second = environment.app.kept_and_waits.apply_async((body.row,), queue="prefork").get(timeout=10)
    assert KEPT <= (second - body.result.get(timeout=10)) / 1e6 <= KEPT + LATE


@pytest.mark.invariant("hold-times-are-kept", "max-hold-ends-a-hanging-body")
def test_body_that_ignores_max_hold_is_logged_and_the_next_runs_within_the_ttl(environment: LosingEnvironment) -> None:
    body = environment.begin("prefork", "hung_and_deaf", 6.0)
    eventually(lambda: environment.lost(body) == ["it was held for as long as max_hold allows"], 1.0 + LATE)
    told = time.monotonic()
    assert told - body.began >= 0.9
    assert freed(environment, body.key) - told <= TTL
    assert environment.app.hung_and_deaf.apply_async((body.row, 0.1), queue="prefork").get(timeout=10) == "done"
    assert ended(body) == "done"


def test_hard_time_limit_alone_sets_no_end_to_the_lease(environment: LosingEnvironment) -> None:
    """Celery may not enforce it. The lock is free when the process is dead that Celery kills for it."""
    result = environment.app.says_until_when.apply_async((environment.row(),), queue="prefork", time_limit=20)
    assert result.get(timeout=10) == 0.0
