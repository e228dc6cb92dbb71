"""The core of what a worker does, with locks under Sentinel, in a Cluster, on Redlock and in PostgreSQL."""

import json
import os
import signal
import time
from contextlib import ExitStack, contextmanager

import pytest
from celery.exceptions import TaskRevokedError

from celery_dlock.locking.watchdog import FREED_WITHIN
from tests.support.environ import environment_variables
from tests.support.environments.policies import PolicyEnvironment
from tests.support.polling import eventually
from tests.support.postgresql import running_postgresql
from tests.support.servers import Server
from tests.support.topologies import MASTER_NAME
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.topologies"

pytestmark = pytest.mark.usefixtures("show_logs")


def _conf(kind, request):
    if kind == "sentinel":
        url = request.getfixturevalue("sentinel_set").lock_url()
        return {"dlock_url": url, "dlock_transport_options": {"master_name": MASTER_NAME}}
    if kind == "cluster":
        return {"dlock_url": request.getfixturevalue("cluster_set").lock_url()}
    if kind == "postgresql":
        return {"dlock_url": request.getfixturevalue("postgresql_url")}
    # Without the delay, because such servers would grant nothing for a ttl from their first start on.
    return {"dlock_url": request.getfixturevalue("redlock_set").lock_urls()[:3], "dlock_quarantine": 0}


@contextmanager
def _running(conf, folder, *, queue):
    ours = {"DLOCK_TEST_CONF": json.dumps(conf), "DLOCK_TEST_QUEUE": "yes" if queue else "no"}
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "server"))
        urls = Urls(server.url(0), server.url(1), "")
        stack.enter_context(environment_variables(ours))
        tasks = stack.enter_context(loaded_app(APP, urls))
        made = PolicyEnvironment(server, urls, tasks, folder)
        made.workers = [stack.enter_context(running_worker(APP, folder=folder, urls=urls, concurrency=4))]
        yield made


POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.servers)


@pytest.fixture(scope="module")
def postgresql_url():
    from tests.support.postgresql_stores import migrated_schema, url_of  # noqa: PLC0415  # needs psycopg

    with running_postgresql() as server, migrated_schema(server) as schema:
        yield url_of(server, schema)


@pytest.fixture(scope="module", params=["sentinel", "cluster", "redlock", POSTGRESQL])
def environment(request, tmp_path_factory):
    conf = _conf(request.param, request)
    with _running(conf, tmp_path_factory.mktemp(request.param), queue=request.param != "redlock") as made:
        yield made


def test_the_lock_is_taken_before_the_body_and_free_when_its_result_is_there(environment):
    n = environment.fresh()
    with environment.hold(environment.tasks.skips, n) as holding:
        assert environment.locked(environment.tasks.skips, n)
        assert environment.tasks.skips.lock_for(n).holder().task_id == holding.id
        assert holding.end() is True
    environment.free(environment.tasks.skips, n, within=1.0)
    assert environment.tasks.skips.delay(n).get(timeout=15) is True


def test_skip_a_second_call_ends_revoked_while_the_first_is_inside(environment):
    n = environment.fresh()
    with (
        environment.hold(environment.tasks.skips, n),
        pytest.raises(TaskRevokedError, match=r"held by topologies\.skips"),
    ):
        environment.tasks.skips.delay(n).get(timeout=15)
    assert environment.overlaps(n) == 1


def test_retry_a_second_call_runs_when_the_first_has_left(environment):
    n = environment.fresh()
    holding = environment.hold(environment.tasks.retries, n)
    second = environment.tasks.retries.delay(n)
    environment.wait_for_line(second.id, "is republished")
    holding.end()
    assert second.get(timeout=15) is True
    assert environment.overlaps(n) == 1


def test_wait_the_second_is_woken_by_the_release(environment):
    n = environment.fresh()
    holding = environment.hold(environment.tasks.waits, n)
    second = environment.tasks.waits.delay(n)
    # Its slot is taken: the task has started, its body has not.
    eventually(lambda: second.state == "STARTED" or environment.lines(second.id, "received"))
    holding.end()
    assert second.get(timeout=15) is True
    left = next(fact["at"] for fact in environment.history(n=n, what="out"))
    entered = environment.history(n=n, what="in", id=second.id)[0]["at"]
    assert 0 < entered - left < 1.0
    tokens = [fact["token"] for fact in environment.history(n=n, what="in")]
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("environment", ["sentinel", "cluster", POSTGRESQL], indirect=True)  # Redlock refuses it
def test_queue_those_that_wait_run_one_by_one_in_the_order_of_their_sending(environment):
    n = environment.fresh()
    holding = environment.hold(environment.tasks.queues, n)
    others = []
    for _ in range(3):
        others.append(environment.tasks.queues.delay(n))
        environment.wait_for_line(others[-1].id, "is parked")
    holding.end()
    assert [other.get(timeout=20) for other in others] == [True, True, True]
    assert [fact["id"] for fact in environment.history(n=n, what="in")] == [holding.id, *(other.id for other in others)]
    assert environment.overlaps(n) == 1


def test_a_killed_child_frees_its_lock_within_a_second(environment):
    n = environment.fresh()
    environment.tasks.skips.delay(n, f"{n}-never")
    (inside,) = environment.entered(n=n)
    assert environment.locked(environment.tasks.skips, n)
    os.kill(inside["pid"], signal.SIGKILL)
    died = seen = time.monotonic()

    def free():
        nonlocal seen
        looked = time.monotonic()
        if environment.locked(environment.tasks.skips, n):
            seen = looked
        return seen < looked

    eventually(free, 10)
    assert seen - died < FREED_WITHIN


def test_a_lease_of_three_seconds_is_renewed_until_its_body_ends(environment):
    n = environment.fresh()
    with environment.hold(environment.tasks.short, n) as holding:
        token = environment.tasks.short.lock_for(n).holder().token
        until = time.monotonic() + 4.5
        seen = set()
        while time.monotonic() < until:
            holder = environment.tasks.short.lock_for(n).holder()
            seen.add(holder and holder.token)
            time.sleep(0.2)
        assert seen == {token}
        assert holding.end() is True
