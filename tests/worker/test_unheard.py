"""A message whose acknowledgement the broker did not hear is delivered again, and does not run again."""

import re

import pytest
import redis

from celery_dlock.keys import LockKeys
from celery_dlock.records import Identity
from tests.conftest import WORKERS
from tests.servers import Server
from tests.waiting import eventually
from tests.workers import Urls, loaded_app, running_worker

pytestmark = pytest.mark.core
APP = "tests.apps.unheard"


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield Urls(server.url(0), server.url(1), server.url(2))


@pytest.fixture(scope="module")
def tasks(urls):
    with loaded_app(APP, urls) as tasks:
        yield tasks


@pytest.fixture
def worker(urls, tmp_path, request):
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=1) as worker:
        request.node.stash[WORKERS] = [worker]
        yield worker


@pytest.fixture
def broker(urls):
    with redis.Redis.from_url(urls.broker) as broker:
        yield broker


def deliver_again(tasks, broker):
    """What kombu does after the visibility timeout."""
    with tasks.app.connection_for_read() as connection:
        for tag in broker.hkeys("unacked"):
            connection.default_channel.qos.restore_by_tag(tag.decode())


def all_heard(broker):
    return not broker.llen("celery") and not broker.hlen("unacked")


def ran_once(tasks, result, n, end=""):
    assert tasks.notes.lrange("ran", 0, -1).count(n) == 1
    assert result.state == ("FAILURE" if end else "SUCCESS")


@pytest.mark.parametrize("end", ["", "fail"])
@pytest.mark.parametrize("name", ["early", "late"])
def test_a_message_whose_acknowledgement_is_not_heard_runs_once(tasks, worker, broker, name, end):
    """Acknowledged at its start, too: else a send whose broker's connection breaks just then goes out twice."""
    n = f"{name}-{end}"
    tasks.notes.set("deaf", 1)
    result = getattr(tasks, name).delay(n, end)
    result.get(timeout=10, propagate=False)
    # At its start or at its end.
    worker.wait_for_log("Couldn't ack")
    eventually(lambda: not tasks.early.lock_for(n).locked(), 10)
    tasks.notes.delete("deaf")
    deliver_again(tasks, broker)
    worker.wait_for_log(rf"{result.id}\] is a duplicate")
    eventually(lambda: all_heard(broker), 10)
    ran_once(tasks, result, n, end)


@pytest.mark.parametrize("end", ["", "fail"])
def test_an_end_in_whose_round_the_event_loop_breaks_is_known_before_the_loop_runs_again(
    tasks, worker, broker, urls, tmp_path, request, end
):
    """Its worker is killed without having seen its broker again; another one has the copy by then."""
    n = f"cut-{end}"
    tasks.notes.set("away", 1)
    tasks.notes.set("cut", 1)
    result = tasks.late.delay(n, end)
    worker.wait_for_log("Couldn't ack")
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=1) as other:
        request.node.stash[WORKERS].append(other)
        deliver_again(tasks, broker)
        other.wait_for_log(rf"{result.id}\] is a duplicate")
        worker.kill()
        tasks.notes.delete("away")
        eventually(lambda: all_heard(broker), 10)
        ran_once(tasks, result, n, end)
        assert not re.search(rf"{result.id}.*(succeeded|raised)", other.log())


@pytest.mark.parametrize("end", ["", "fail"])
def test_an_acknowledgement_that_the_event_loop_forgets_is_made_up_for(tasks, worker, broker, urls, end):
    """Kombu's loop forgets what else was to be done in the round in which it breaks."""
    n = f"forgotten-{end}"
    tasks.notes.set("forget", 1)
    result = tasks.late.delay(n, end)
    result.get(timeout=10, propagate=False)
    done = LockKeys.of("dlock", tasks.late.lock_spec.name_of((n,), {})).done(Identity(result.id, 0, 0).digest)
    with redis.Redis.from_url(urls.lock) as locks:
        eventually(lambda: locks.exists(done), 10)
    deliver_again(tasks, broker)
    worker.wait_for_log(rf"{result.id}\] is a duplicate")
    eventually(lambda: all_heard(broker), 10)
    ran_once(tasks, result, n, end)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("name", ["early", "late"])
def test_those_that_are_heard_are_not_marked(tasks, broker, name):
    """A mark costs the main process a connection and a script."""
    getattr(tasks, name).delay(f"{name} first").get(timeout=10)
    before = broker.info("stats")["total_connections_received"]
    for number in range(20):
        getattr(tasks, name).delay(f"{name} {number}").get(timeout=10)
    eventually(lambda: not broker.hlen("unacked"), 10)
    assert broker.info("stats")["total_connections_received"] - before < 10
