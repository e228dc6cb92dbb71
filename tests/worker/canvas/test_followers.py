"""A finished holder is not a rival: what is published before its release runs, under every pool and policy."""

import pytest
from celery import chain, chord

from tests.conftest import WORKERS
from tests.support.environments.policies import running_environment
from tests.support.polling import eventually

POOLS = ["prefork", "solo", "threads", "gevent", "eventlet"]


@pytest.fixture(scope="module", params=POOLS)
def environment(request, tmp_path_factory):
    # More slots than followers, else a free slot would come only after the release.
    concurrency = 1 if request.param == "solo" else 4
    with running_environment(tmp_path_factory.mktemp("followers"), pool=request.param, concurrency=concurrency) as made:
        yield made


@pytest.fixture(params=["lingers_and_skips", "lingers_and_raises"])
def task(environment, request):
    request.node.stash[WORKERS] = environment.workers
    return getattr(environment.tasks, request.param)


def ran(environment, n, times):
    """That many bodies of `n`, one after the other, each soon after the one before."""
    eventually(lambda: len(environment.history(what="out", n=n)) == times, 10, message=f"bodies of {n}")
    assert environment.overlaps(n) == 1
    bodies = environment.history(what="in", n=n)
    ends = environment.history(what="out", n=n)
    waited = [entered["at"] - left["at"] for left, entered in zip(ends, bodies[1:], strict=False)]
    assert max(waited) < 1.0, waited


@pytest.mark.invariant("finished-holder-is-no-conflict")
def test_the_next_step_of_a_chain(environment, task):
    n = environment.fresh()
    assert chain(task.si(n), task.si(n)).apply_async().get(timeout=15) == n
    ran(environment, n, 2)


def test_a_callback(environment, task):
    n = environment.fresh()
    assert task.apply_async((n,), link=task.si(n)).get(timeout=15) == n
    ran(environment, n, 2)


def test_an_errback(environment, task):
    n = environment.fresh()
    task.apply_async((n,), {"end": "fail"}, link_error=task.si(n))
    ran(environment, n, 2)


def test_the_body_of_its_chord(environment, task):
    n = environment.fresh()
    assert chord([task.si(n)], task.si(n)).apply_async().get(timeout=15) == n
    ran(environment, n, 2)


@pytest.mark.invariant("finished-holder-is-no-conflict")
def test_its_own_retry(environment, task):
    n = environment.fresh()
    result = task.delay(n, end="retry")
    assert result.get(timeout=15) == n
    ran(environment, n, 2)
    assert [fact["retries"] for fact in environment.history(what="in", n=n)] == [0, 1]


def test_its_own_replacement(environment, task):
    n = environment.fresh()
    assert task.delay(n, end="replace").get(timeout=15) == n
    ran(environment, n, 2)
