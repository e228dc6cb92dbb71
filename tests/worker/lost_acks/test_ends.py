"""A message whose acknowledgement the broker did not hear is delivered again, and does not run again."""

import re
import time

import psutil
import pytest
import redis

from tests.conftest import WORKERS
from tests.support.environments.lost_acks import APP, all_heard, deliver_again, has_word, is_marked, ran_once
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

pytestmark = [pytest.mark.core, pytest.mark.celerys]


@pytest.mark.invariant("done-is-final", "lost-ack-runs-nothing-twice")
@pytest.mark.parametrize("end", ["", "fail"])
@pytest.mark.parametrize("name", ["early", "late"])
def test_message_whose_acknowledgement_is_lost_runs_once(tasks, worker, broker, name, end):
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


@pytest.mark.invariant("done-is-final", "lost-ack-runs-nothing-twice")
@pytest.mark.parametrize("end", ["", "fail"])
def test_end_during_an_event_loop_failure_is_marked_before_the_loop_runs_again(
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


@pytest.mark.invariant("done-is-final", "lost-ack-runs-nothing-twice")
@pytest.mark.parametrize("end", ["", "fail"])
def test_an_acknowledgement_that_the_event_loop_forgets_is_made_up_for(tasks, worker, broker, urls, end):
    """Kombu's loop forgets what else was to be done in the round in which it breaks."""
    n = f"forgotten-{end}"
    tasks.notes.set("forget", 1)
    result = tasks.late.delay(n, end)
    result.get(timeout=10, propagate=False)
    eventually(lambda: is_marked(tasks, urls, result, n), 10)
    deliver_again(tasks, broker)
    worker.wait_for_log(rf"{result.id}\] is a duplicate")
    eventually(lambda: all_heard(broker), 10)
    ran_once(tasks, result, n, end)


@pytest.mark.invariant("lost-ack-runs-nothing-twice")
def test_two_ends_in_the_round_in_which_the_event_loop_breaks_run_once_each(tasks, broker, urls, tmp_path, request):
    """The loop forgets the second, and with the channel both are back at the broker: another worker waits for them."""
    with (
        running_worker(APP, folder=tmp_path, urls=urls, concurrency=2) as worker,
        running_worker(APP, "-Q", "other", folder=tmp_path, urls=urls, concurrency=2) as other,
    ):
        request.node.stash[WORKERS] = [worker, other]
        tasks.notes.mset({"stay": 1, "cut": 1, "away": 1})
        results = [tasks.late.delay(n, "stay") for n in "AB"]
        eventually(lambda: tasks.notes.llen("ran") == 2, 10)
        main = psutil.Process(worker.process.pid)
        main.suspend()
        tasks.notes.delete("stay")
        for result in results:
            result.get(timeout=10)
        tasks.app.control.add_consumer("celery", destination=[other.node])
        main.resume()
        for result in results:
            other.wait_for_log(rf"{result.id}\] is a duplicate")
        tasks.notes.delete("away")
        eventually(lambda: all_heard(broker), 10)
        assert sorted(tasks.notes.lrange("ran", 0, -1)) == ["A", "B"]


@pytest.mark.invariant("lost-ack-runs-nothing-twice")
def test_a_body_that_ends_while_celery_closes_its_broken_connection_runs_once(tasks, broker, urls, tmp_path, request):
    """For which it takes up to a second: then the message is back, and its end not read yet."""
    with (
        running_worker(APP, folder=tmp_path, urls=urls, concurrency=2) as worker,
        running_worker(APP, "-Q", "other", folder=tmp_path, urls=urls, concurrency=2) as other,
    ):
        request.node.stash[WORKERS] = [worker, other]
        tasks.notes.mset({"stay": 1, "cut": 1, "away": 1, "close": 1})
        held = tasks.late.delay("B", "stay")
        eventually(lambda: tasks.notes.llen("ran") == 1, 10)
        tasks.late.delay("A")
        worker.wait_for_log("Couldn't ack")
        eventually(lambda: has_word(tasks, urls, "B"), 10)
        tasks.notes.delete("stay")
        held.get(timeout=10)
        tasks.app.control.add_consumer("celery", destination=[other.node])
        tasks.notes.delete("close")
        other.wait_for_log(rf"{held.id}\] is a duplicate")
        tasks.notes.delete("away")
        eventually(lambda: all_heard(broker), 10)
        assert tasks.notes.lrange("ran", 0, -1).count("B") == 1


@pytest.mark.invariant("failure-stays-failure")
def test_a_failure_stays_one_though_celery_cancelled_it_meanwhile(tasks, broker, urls, tmp_path, request):
    """It failed while Celery closed the connection, which then stores RETRY over it; its copy does not run."""
    environ = {"DLOCK_TEST_CANCEL": "1"}
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=2, environ=environ) as worker:
        request.node.stash[WORKERS] = [worker]
        tasks.notes.mset({"stay": 1, "cut": 1, "cancel": 1})
        failed = tasks.late.delay("B", "stay fail")
        eventually(lambda: tasks.notes.llen("ran") == 1, 10)
        tasks.late.delay("A")
        eventually(lambda: tasks.notes.exists("cancelling"), 10)
        eventually(lambda: has_word(tasks, urls, "B"), 10)
        tasks.notes.delete("stay")
        eventually(lambda: failed.backend.get_task_meta(failed.id, cache=False)["status"] == "FAILURE", 10)
        tasks.notes.delete("cancel")
        worker.wait_for_log(rf"{failed.id}\] is a duplicate", 30)
        eventually(lambda: all_heard(broker), 10)
        assert tasks.notes.lrange("ran", 0, -1).count("B") == 1
        assert failed.backend.get_task_meta(failed.id, cache=False)["status"] == "FAILURE"


@pytest.mark.invariant("visibility-timeout-runs-nothing-twice")
@pytest.mark.parametrize("ended_after", [0.0, 3.5])
@pytest.mark.parametrize("end", ["", "fail"])
def test_end_acknowledged_after_its_visibility_timeout_is_marked(
    tasks, broker, urls, tmp_path, request, end, ended_after
):
    """It has delivered the message again by then: the worker's main process stood still while the body ended.

    Also an end so near the visibility timeout of 5 s that the watchdog would have left word, which stood still with it.
    """
    n = f"late-{end}"
    environ = {"DLOCK_TEST_VISIBILITY": "5"}
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=1, environ=environ) as worker:
        request.node.stash[WORKERS] = [worker]
        tasks.notes.set("stay", 1)
        received = time.monotonic()
        result = tasks.late.delay(n, f"stay {end}")
        eventually(lambda: n in tasks.notes.lrange("ran", 0, -1), 10)
        main = psutil.Process(worker.process.pid)
        main.suspend()
        eventually(lambda: time.monotonic() - received > ended_after, 10)
        tasks.notes.delete("stay")
        result.get(timeout=10, propagate=False)
        deliver_again(tasks, broker)
        eventually(lambda: time.monotonic() - received > 4, 10)
        assert not is_marked(tasks, urls, result, n)
        main.resume()
        worker.wait_for_log(rf"{result.id}\] is a duplicate")
        eventually(lambda: all_heard(broker), 10)
        ran_once(tasks, result, n, end)


@pytest.mark.invariant("done-is-final", "lost-ack-runs-nothing-twice")
@pytest.mark.parametrize("end", ["replace", "die", "revoked"])
def test_message_with_lost_ack_runs_once_after_every_ending(tasks, worker, broker, urls, tmp_path, request, end):
    """A replacement, a dead child, a body that was terminated."""
    n = f"{end} late"
    tasks.notes.set("deaf", 1)
    tasks.notes.set("stay", 1)
    result = tasks.late.delay(n, "stay" if end == "revoked" else end)
    if end == "revoked":
        eventually(lambda: n in tasks.notes.lrange("ran", 0, -1), 10)
        result.revoke(terminate=True, signal="SIGKILL")
    worker.wait_for_log("Couldn't ack")
    eventually(lambda: is_marked(tasks, urls, result, n), 10)
    if end == "replace":
        eventually(lambda: is_marked(tasks, urls, result, f"instead of {n}", nesting=1), 10)
    # Another worker knows of no revocation.
    worker.kill()
    tasks.notes.delete("deaf")
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=1) as other:
        request.node.stash[WORKERS].append(other)
        deliver_again(tasks, broker)
        other.wait_for_log(rf"{result.id}\] is a duplicate")
        eventually(lambda: all_heard(broker), 10)
    ran = tasks.notes.lrange("ran", 0, -1)
    assert ran.count(n) == 1
    assert ran.count(f"instead of {n}") == (end == "replace")


@pytest.mark.invariant("lost-ack-runs-nothing-twice")
def test_skipped_message_with_lost_ack_does_not_run_when_its_lock_is_free(tasks, worker, broker):
    """Its end is stored: its chord has failed, its sender has gone on."""
    n = "skipped"
    tasks.notes.set("deaf", 1)
    with tasks.late.lock_for(n):
        result = tasks.late.delay(n)
        worker.wait_for_log("Couldn't ack")
        eventually(lambda: result.state == "REVOKED", 10)
    tasks.notes.delete("deaf")
    deliver_again(tasks, broker)
    worker.wait_for_log(rf"{result.id}\] is a duplicate")
    eventually(lambda: all_heard(broker), 10)
    assert n not in tasks.notes.lrange("ran", 0, -1)
    assert result.state == "REVOKED"


@pytest.mark.invariant("new-message-runs")
def test_message_republished_later_runs_although_its_ack_was_lost(tasks, worker, broker):
    """It has no end yet: a mark would end the copy that was published for it."""
    n = "comes back"
    tasks.notes.set("deaf", 1)
    with tasks.late.lock_for(n):
        result = tasks.late.apply_async((n,), dlock={"on_conflict": "retry", "retry_delay": 0.5})
        worker.wait_for_log(rf"{result.id}\] is republished")
        worker.wait_for_log("Couldn't ack")
    tasks.notes.delete("deaf")
    assert result.get(timeout=10) == n
    deliver_again(tasks, broker)
    eventually(lambda: all_heard(broker), 10)


@pytest.mark.invariant("done-is-final", "unfinished-message-runs-again")
@pytest.mark.parametrize("end", ["anew", "anew slowly", "reject", "reject slowly"])
@pytest.mark.parametrize("name", ["early", "late"])
def test_a_message_that_its_body_ignored_or_rejected_is_not_marked(tasks, worker, broker, urls, name, end):
    """It may have published it anew, and what is rejected may be for another exchange: a second run, and no loss.

    Slowly: with word of the watchdog, so that its release could mark it.
    """
    n = f"{name} {end} itself"
    tasks.notes.set("deaf", 1)
    result = getattr(tasks, name).delay(n, end)
    worker.wait_for_log("Couldn't (ack|reject)")
    eventually(lambda: tasks.notes.lrange("ran", 0, -1).count(n) >= 1, 10)
    eventually(lambda: not tasks.early.lock_for(n).locked(), 10)
    tasks.notes.delete("deaf")
    # More than it takes to mark ends without an acknowledgement.
    tasks.early.delay("another").get(timeout=10)
    # The message that it published anew has its id, and an end of its own.
    assert end.startswith("anew") or not is_marked(tasks, urls, result, n)
    deliver_again(tasks, broker)
    eventually(lambda: tasks.notes.lrange("ran", 0, -1).count(n) >= 2, 10)
    eventually(lambda: all_heard(broker), 10)


@pytest.mark.invariant("done-is-final", "unfinished-message-runs-again")
def test_message_that_its_body_published_again_runs_beside_a_copy(tasks, broker, urls, tmp_path, request):
    """Nothing fails here: with a second slot the new message meets the old one's body, and leaves word in its lock."""
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=2) as worker:
        request.node.stash[WORKERS] = [worker]
        tasks.late.delay("duplicate", "anew slowly")
        worker.wait_for_log("another delivery of this message")
        eventually(lambda: tasks.notes.lrange("ran", 0, -1).count("duplicate") == 2, 10)
        eventually(lambda: all_heard(broker), 10)


@pytest.mark.invariant("unfinished-message-runs-again")
@pytest.mark.parametrize("end", ["fail", "slowly fail"])
def test_a_failure_that_celery_rejects_is_not_marked(tasks, broker, urls, tmp_path, request, end):
    """Without ``acks_on_failure_or_timeout``: its copy is to be rejected, too, for the dead letter exchange.

    Slowly: with word of the watchdog, which doubts it from a second on, so that its release could mark it.
    """
    n = f"rejected {end}"
    environ = {"DLOCK_TEST_VISIBILITY": "3"}
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=1, environ=environ) as worker:
        request.node.stash[WORKERS] = [worker]
        tasks.notes.set("deaf", 1)
        result = tasks.rejecting.delay(n, end)
        worker.wait_for_log("Couldn't reject")
        tasks.notes.delete("deaf")
        tasks.early.delay("another").get(timeout=10)
        assert not is_marked(tasks, urls, result, n)
        deliver_again(tasks, broker)
        eventually(lambda: tasks.notes.llen("rejected") == 1, 10)
        eventually(lambda: all_heard(broker), 10)


@pytest.mark.invariant("done-is-final", "unfinished-message-runs-again")
def test_a_child_that_died_before_it_held_its_lock_ends_no_message(tasks, worker, broker, urls):
    """It may have been parked, or published again: by a process that was killed a moment later."""
    n = "not held"
    tasks.notes.set("deaf", 1)
    result = tasks.late.delay(n, "die unheld")
    worker.wait_for_log("Couldn't ack")
    tasks.notes.delete("deaf")
    tasks.early.delay("another").get(timeout=10)
    assert not is_marked(tasks, urls, result, n)
    deliver_again(tasks, broker)
    eventually(lambda: tasks.notes.lrange("ran", 0, -1).count(n) == 1, 10)


@pytest.mark.invariant("new-message-runs")
@pytest.mark.parametrize("end", ["", "fail"])
def test_a_mark_that_comes_late_does_not_end_a_message_that_its_sender_sent_again(tasks, worker, broker, urls, end):
    """Under the same id, after the first one's end and before its mark."""
    n = f"again {end}"
    tasks.notes.set("stay", 1)
    tasks.notes.set("forget", 1)
    first = tasks.late.delay(n, end)
    first.get(timeout=10, propagate=False)
    tasks.early.delay("in its way", "stay")
    tasks.late.apply_async((n,), task_id=first.id)
    eventually(lambda: is_marked(tasks, urls, first, n), 10)
    tasks.notes.delete("stay")
    eventually(lambda: tasks.notes.lrange("ran", 0, -1).count(n) == 2, 10)
    deliver_again(tasks, broker)
    worker.wait_for_log(rf"{first.id}\] is a duplicate")
    eventually(lambda: all_heard(broker), 10)
    assert tasks.notes.lrange("ran", 0, -1).count(n) == 2


@pytest.mark.invariant("deduplicated-copy-is-acknowledged")
def test_a_copy_that_celery_itself_knows_for_one_is_acknowledged(tasks, broker, urls, tmp_path, request):
    """With ``worker_deduplicate_successful_tasks`` it ends without a runtime, as a body that a green pool killed."""
    environ = {"DLOCK_TEST_DEDUPLICATE": "1"}
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=1, environ=environ) as worker:
        request.node.stash[WORKERS] = [worker]
        tasks.notes.set("deaf", 1)
        result = tasks.late.delay("celery knows")
        result.get(timeout=10)
        worker.wait_for_log("Couldn't ack")
        tasks.notes.delete("deaf")
        deliver_again(tasks, broker)
        worker.wait_for_log("already completed successfully")
        eventually(lambda: all_heard(broker), 10)
        ran_once(tasks, result, "celery knows")
        assert len(re.findall(rf"{result.id}\] received", worker.log())) == 2


@pytest.mark.invariant("done-is-final", "lost-ack-runs-nothing-twice")
def test_a_mark_that_the_store_did_not_take_is_made_up_for(tmp_path, request):
    """Lock store and broker are away at once where both are one server, or behind one network."""
    with Server(tmp_path / "locks", persistent=True) as locks, Server(tmp_path / "others") as others:
        urls = Urls(others.url(0), others.url(1), locks.lock_url(2))
        with (
            loaded_app(APP, urls) as tasks,
            running_worker(APP, folder=tmp_path, urls=urls, concurrency=1) as worker,
            redis.Redis.from_url(urls.broker) as broker,
        ):
            request.node.stash[WORKERS] = [worker]
            tasks.notes.set("deaf", 1)
            tasks.notes.set("stay", 1)
            result = tasks.late.delay("away", "stay")
            eventually(lambda: "away" in tasks.notes.lrange("ran", 0, -1), 10)
            locks.kill()
            tasks.notes.delete("stay")
            worker.wait_for_log(rf"cannot mark {tasks.late.name}\[{result.id}\] as done yet", 20)
            locks.start()
            eventually(lambda: is_marked(tasks, urls, result, "away"), 10)
            tasks.notes.delete("deaf")
            deliver_again(tasks, broker)
            worker.wait_for_log(rf"{result.id}\] is a duplicate", 20)
            ran_once(tasks, result, "away")


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


@pytest.mark.invariant("lost-ack-runs-nothing-twice")
def test_message_of_a_stopped_child_runs_once_though_its_connection_was_cut(own_server, urls, tmp_path, request):
    """Celery drops a message whose child has not said that it begins, and never learns of its end."""
    server = own_server()
    own = Urls(server.url(), urls.result, urls.lock)
    with running_worker(APP, folder=tmp_path, urls=own, concurrency=1) as worker, loaded_app(APP, own) as tasks:
        request.node.stash[WORKERS] = [worker]
        (child,) = psutil.Process(worker.pid).children()
        child.suspend()
        result = tasks.late.delay("stopped")
        worker.wait_for_log(rf"{result.id}\] received")
        # A further round of the event loop: the child's pipe has the message.
        assert tasks.app.control.ping(timeout=10, limit=1)
        with server.client() as broker:
            broker.client_kill_filter(_type="normal", skipme=True)
            worker.wait_for_log("Connection to broker lost")
            eventually(lambda: len(re.findall(rf"{result.id}\] received", worker.log())) == 2, 20)
            child.resume()
            worker.wait_for_log(rf"{result.id}\] is a duplicate", 20)
            eventually(lambda: not broker.llen("celery") and not broker.hlen("unacked"), 10)
        ran_once(tasks, result, "stopped")
