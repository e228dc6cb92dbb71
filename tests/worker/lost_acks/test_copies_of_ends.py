"""Copies of a message that has an end: what they meet on their way does not make them run."""

import inspect
import json
import re
import signal
import time

import psutil
import pytest
import redis
from celery.worker.request import Request

from tests.conftest import WORKERS
from tests.support.environments.lost_acks import APP, all_heard, deliver_again, has_word, is_marked, ran, stored
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker


def flagged_redelivered(text):
    """Return a message of the broker with the flags with which kombu restores it."""
    message = json.loads(text)
    message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
    return json.dumps(message)


@pytest.fixture
def locks_of_one(urls, tmp_path, request):
    """A worker that reaches the store through a proxy and consumes nothing yet, and one that consumes `other`."""
    port = int(urls.lock.rpartition(":")[2].partition("/")[0])
    with Proxy(port) as proxy:
        behind = Urls(urls.broker, urls.result, urls.lock.replace(f":{port}", f":{proxy.port}"))
        with (
            running_worker(APP, "-Q", "none", folder=tmp_path, urls=behind, concurrency=1) as worker,
            running_worker(APP, "-Q", "other", folder=tmp_path, urls=urls, concurrency=1) as other,
        ):
            request.node.stash[WORKERS] = [worker, other]
            yield proxy, worker


pytestmark = [pytest.mark.core, pytest.mark.celerys]
#: From 5.6 on, Celery learns how what it cancelled has ended. A cold shutdown stores nothing of what is redelivered.
newer = pytest.mark.skipif(
    "emit_retry" not in inspect.signature(Request.cancel).parameters,
    reason="docs/explanation/guarantees.md says so of Celery 5.5",
)


@pytest.mark.invariant("duplicates-do-not-run", "lost-ack-runs-nothing-twice")
@pytest.mark.parametrize("heard", [True, False])
def test_a_copy_that_meets_a_store_which_is_away_does_not_run_behind_the_end(tmp_path, request, heard):
    """Of a body that outlives its visibility timeout, or of whose end the broker did not hear."""
    with Server(tmp_path / "locks", persistent=True) as locks, Server(tmp_path / "others") as others:
        urls = Urls(others.url(0), others.url(1), locks.lock_url(2))
        environ = {"DLOCK_TEST_VISIBILITY": "4"} if heard else {}
        with (
            loaded_app(APP, urls) as tasks,
            running_worker(APP, folder=tmp_path, urls=urls, concurrency=2, environ=environ) as worker,
            redis.Redis.from_url(urls.broker) as broker,
        ):
            request.node.stash[WORKERS] = [worker]
            tasks.notes.mset({"stay": 1} if heard else {"stay": 1, "deaf": 1})
            result = tasks.late.delay("away", "stay")
            eventually(lambda: ran(tasks, "away") == 1, 10)
            if heard:
                eventually(lambda: has_word(tasks, urls, "away"), 10)
            locks.kill()
            if not heard:
                tasks.notes.delete("stay")
                worker.wait_for_log(rf"cannot mark {tasks.late.name}\[{result.id}\] as done yet", 20)
                tasks.notes.delete("deaf")
            deliver_again(tasks, broker)
            worker.wait_for_log(rf"{result.id}\] is republished", 20)
            locks.start()
            tasks.notes.delete("stay")
            eventually(lambda: is_marked(tasks, urls, result, "away"), 10)
            worker.wait_for_log(rf"{result.id}\] is a duplicate", 20)
            eventually(lambda: all_heard(broker), 10)
            assert ran(tasks, "away") == 1


@pytest.mark.invariant("duplicates-do-not-run")
@pytest.mark.parametrize("policy", ["retry", "queue"])
def test_copy_received_before_the_end_does_not_run_though_its_store_was_away(tasks, broker, urls, locks_of_one, policy):
    """Two workers have a copy each: the store answers only the one whose body runs. The other copy is republished."""
    n = f"first receipt {policy}"
    proxy, worker = locks_of_one
    proxy.set_mode("refuse")
    result = tasks.late.apply_async((n,), dlock={"on_conflict": policy})
    (message,) = eventually(lambda: broker.lrange("celery", 0, -1))
    tasks.app.control.add_consumer("celery", destination=[worker.node])
    worker.wait_for_log(rf"{result.id}\] is republished", 20)
    broker.lpush("other", flagged_redelivered(message))
    eventually(lambda: ran(tasks, n) == 1, 10)
    eventually(lambda: is_marked(tasks, urls, result, n), 10)
    proxy.set_mode("pass")
    worker.wait_for_log(rf"{result.id}\] is a duplicate", 30)
    eventually(lambda: all_heard(broker), 10)
    assert ran(tasks, n) == 1
    # The id is used again: this message was received after the end, and its store is away at first, too.
    proxy.set_mode("refuse")
    before = len(re.findall(rf"{result.id}\] is republished", worker.log()))
    tasks.late.apply_async((n,), task_id=result.id, dlock={"on_conflict": policy})
    eventually(lambda: len(re.findall(rf"{result.id}\] is republished", worker.log())) > before, 20)
    proxy.set_mode("pass")
    eventually(lambda: ran(tasks, n) == 2, 30)
    eventually(lambda: all_heard(broker), 10)


@pytest.mark.invariant("lost-ack-runs-nothing-twice")
@pytest.mark.parametrize("policy", ["retry", "queue"])
def test_a_copy_that_meets_a_rival_before_the_mark_is_set_does_not_run_behind_it(
    tasks, broker, urls, tmp_path, request, policy
):
    """The main process stands still after the end of its body: the end is not marked when the copy asks first."""
    n = f"rival {policy}"
    environ = {"DLOCK_TEST_VISIBILITY": "5"}
    chosen = {"on_conflict": policy} | ({"retry_delay": 4} if policy == "retry" else {})
    with (
        running_worker(APP, folder=tmp_path, urls=urls, concurrency=1, environ=environ) as worker,
        running_worker(APP, "-Q", "other", folder=tmp_path, urls=urls, concurrency=1, environ=environ) as other,
    ):
        request.node.stash[WORKERS] = [worker, other]
        tasks.notes.set("stay", 1)
        received = time.monotonic()
        result = tasks.late.apply_async((n, "stay"), dlock=chosen)
        eventually(lambda: ran(tasks, n) == 1, 10)
        main = psutil.Process(worker.process.pid)
        main.suspend()
        suspended = time.monotonic()
        tasks.notes.delete("stay")
        result.get(timeout=10)
        eventually(lambda: not tasks.late.lock_for(n).locked(), 10)
        # Else the broker gives it to the one that stands still, which has asked for something 1 s long.
        eventually(lambda: time.monotonic() - suspended > 1.2, 10)
        with tasks.late.lock_for(n):
            deliver_again(tasks, broker)
            tasks.app.control.add_consumer("celery", destination=[other.node])
            other.wait_for_log(rf"{result.id}\] (is republished|is parked)")
            eventually(lambda: time.monotonic() - received > 4, 10)
            main.resume()
            eventually(lambda: is_marked(tasks, urls, result, n), 10)
        eventually(lambda: f"{result.id}] is a duplicate" in worker.log() + other.log(), 20)
        eventually(lambda: all_heard(broker), 10)
        assert ran(tasks, n) == 1


@pytest.mark.invariant("lost-ack-runs-nothing-twice")
@pytest.mark.parametrize("name", ["early", "late"])
def test_original_whose_ack_was_lost_does_not_run_after_its_republished_copy(
    tasks, broker, urls, tmp_path, request, name
):
    n = f"lost ack of the original {name}"
    task = getattr(tasks, name)
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=1) as worker:
        request.node.stash[WORKERS] = [worker]
        tasks.notes.set("deaf", 1)
        with task.lock_for(n):
            result = task.apply_async((n,), dlock={"on_conflict": "retry", "retry_delay": 1})
            worker.wait_for_log(rf"{result.id}\] is republished")
            worker.wait_for_log("Couldn't ack")
            tasks.notes.delete("deaf")
        eventually(lambda: ran(tasks, n) == 1, 10)
        assert result.get(timeout=10) == n
        eventually(lambda: broker.hlen("unacked") == 1, 10)
        deliver_again(tasks, broker)
        worker.wait_for_log(rf"{result.id}\] is a duplicate", 20)
        eventually(lambda: all_heard(broker), 10)
        assert ran(tasks, n) == 1


@pytest.mark.invariant("visibility-timeout-runs-nothing-twice")
@pytest.mark.parametrize("name", ["early", "late"])
def test_a_body_that_ended_before_its_main_process_knew_of_its_start_runs_once(
    tasks, broker, urls, tmp_path, request, name
):
    """It stood still: what is acknowledged at its start is so only behind the visibility timeout."""
    n = f"frozen {name}"
    environ = {"DLOCK_TEST_VISIBILITY": "5"}
    with (
        running_worker(APP, folder=tmp_path, urls=urls, concurrency=1, environ=environ) as worker,
        running_worker(APP, "-Q", "other", folder=tmp_path, urls=urls, concurrency=1, environ=environ) as other,
    ):
        request.node.stash[WORKERS] = [worker, other]
        tasks.notes.set("freeze", 1)
        received = time.monotonic()
        result = getattr(tasks, name).delay(n)
        result.get(timeout=10)
        main = psutil.Process(worker.process.pid)
        eventually(lambda: main.status() == psutil.STATUS_STOPPED, 10)
        eventually(lambda: time.monotonic() - received > 5, 10)
        deliver_again(tasks, broker)
        main.resume()
        eventually(lambda: is_marked(tasks, urls, result, n, name=name), 10)
        tasks.app.control.add_consumer("celery", destination=[other.node])
        eventually(lambda: f"{result.id}] is a duplicate" in worker.log() + other.log(), 20)
        eventually(lambda: all_heard(broker), 10)
        assert ran(tasks, n) == 1


@pytest.mark.invariant("new-message-runs")
@pytest.mark.parametrize("deaf", [True, False])
def test_message_sent_again_after_the_failure_of_a_dead_child_runs(tasks, urls, tmp_path, request, deaf):
    """Under the same id; the mark of the first one, which a copy may have met, does not end it."""
    n = f"dies {deaf}"
    with running_worker(
        APP, folder=tmp_path, urls=urls, concurrency=1, environ={"DLOCK_TEST_VISIBILITY": "3"}
    ) as worker:
        request.node.stash[WORKERS] = [worker]
        tasks.notes.mset({"stay": 1, "deaf": 1} if deaf else {"stay": 1})
        first = tasks.late.delay(n, "stay")
        eventually(lambda: ran(tasks, n) == 1, 10)
        eventually(lambda: has_word(tasks, urls, n), 10)
        (child,) = psutil.Process(worker.process.pid).children()
        in_its_way = tasks.early.delay("in its way", "stay")
        eventually(lambda: in_its_way.id in worker.log(), 10)
        child.kill()
        eventually(lambda: stored(first) == "FAILURE", 10, every=0.001)
        tasks.notes.delete("deaf")
        tasks.late.apply_async((n,), task_id=first.id)
        eventually(lambda: is_marked(tasks, urls, first, n), 10)
        tasks.notes.delete("stay")
        eventually(lambda: ran(tasks, n) == 2, 10)


@pytest.mark.invariant("failure-stays-failure")
@newer
def test_a_failure_that_is_stored_while_celery_stores_retry_stays_one(tasks, broker, urls, tmp_path, request):
    """It has looked for one by then; the copy does not run, so that RETRY would stay for ever."""
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=2, environ={"DLOCK_TEST_CANCEL": "1"}) as worker:
        request.node.stash[WORKERS] = [worker]
        tasks.notes.mset({"stay": 1, "cut": 1, "retry": 1, "cancel": 1})
        failed = tasks.late.delay("B", "stay stubborn")
        eventually(lambda: ran(tasks, "B") == 1, 10)
        tasks.late.delay("A")
        eventually(lambda: tasks.notes.exists("cancelling"), 10)
        eventually(lambda: has_word(tasks, urls, "B"), 10)
        tasks.notes.delete("cancel")
        eventually(lambda: tasks.notes.exists("retrying"), 10)
        eventually(lambda: stored(failed) == "FAILURE", 10)
        tasks.notes.delete("retry")
        worker.wait_for_log(rf"{failed.id}\] is a duplicate", 30)
        eventually(lambda: all_heard(broker), 10)
        eventually(lambda: stored(failed) == "FAILURE", 10)
        assert ran(tasks, "B") == 1


@pytest.mark.invariant("shutdown-keeps-locks")
@newer
def test_a_cold_shutdown_behind_a_warm_one_does_not_wait_for_a_silent_result_backend(tmp_path, request):
    with Server(tmp_path / "others") as server, Server(tmp_path / "results") as results, Proxy(results.port) as proxy:
        urls = Urls(server.url(0), proxy.url(1), server.lock_url(2))
        with (
            loaded_app(APP, urls) as tasks,
            running_worker(APP, folder=tmp_path, urls=urls, concurrency=2) as worker,
        ):
            request.node.stash[WORKERS] = [worker]
            tasks.notes.set("stay", 1)
            for n in "AB":
                tasks.late.delay(n, "stay")
            eventually(lambda: tasks.notes.llen("ran") == 2, 10)
            proxy.set_mode("blackhole")
            worker.signal(signal.SIGTERM)
            worker.wait_for_log("[Ww]arm shutdown")
            # By then it consumes no more, as where a connection broke.
            told = time.monotonic()
            eventually(lambda: time.monotonic() - told > 1, 10)
            worker.signal(signal.SIGQUIT)
            # Celery's own waiting for what it stops takes 7 s.
            assert worker.process.wait(15) is not None
