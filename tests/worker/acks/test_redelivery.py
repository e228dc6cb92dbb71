"""Copies that the broker really makes: a visibility timeout that passes, a connection that is lost."""

import os
import signal

import pytest

from tests.support.environments.policies import running_environment
from tests.support.polling import eventually

#: Two seconds of visibility, looked for every second; a worker takes no more messages than it has slots.
REDELIVERING = {
    "broker_transport_options": {
        "visibility_timeout": 2,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that dies while it restores keeps the others from it for so long, else for 5 minutes.
        "unacked_mutex_expire": 1,
    },
    "worker_prefetch_multiplier": 1,
}
POLICIES = ["skips_late", "retries_late", "waits_late", "raises_late"]


def put_back(environment, task_id, times=1, within=20.0):
    eventually(
        lambda: len(environment.lines(task_id, "is republished")) >= times,
        within,
        message=f"{task_id} was not put back",
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with running_environment(
        tmp_path_factory.mktemp("redelivery"), workers=2, concurrency=6, conf=REDELIVERING
    ) as made:
        yield made


@pytest.mark.invariant("duplicate-delivery-is-no-conflict", "visibility-timeout-runs-nothing-twice")
def test_a_body_longer_than_the_visibility_timeout_runs_once_under_every_policy(pair, show):
    environment = show(pair)
    holdings = [environment.hold(getattr(environment.tasks, name), environment.fresh()) for name in POLICIES]
    for holding in holdings:
        put_back(environment, holding.id)
    assert [environment.state(holding.id) for holding in holdings] == ["PENDING"] * 4
    for holding in holdings:
        assert holding.end() == holding.n
    environment.wait_until_drained(30)
    for holding in holdings:
        assert environment.state(holding.id) == "SUCCESS"
        assert [fact["what"] for fact in environment.history(id=holding.id)] == ["in", "out"]


@pytest.mark.invariant("visibility-timeout-runs-nothing-twice")
def test_a_rival_that_is_redelivered_while_it_waits_runs_once(pair, show):
    environment = show(pair)
    n = environment.fresh()
    with environment.hold(environment.tasks.waits_late, n):
        rival = environment.tasks.waits_late.delay(n)
        # Both slots' messages outlive the timeout, the holder's and the waiter's.
        eventually(lambda: len(environment.lines(rival.id, "received")) >= 2, 20)
    assert rival.get(timeout=20) == n
    environment.wait_until_drained(30)
    assert len(environment.history(what="in", id=rival.id)) == 1
    assert environment.overlaps(n) == 1


@pytest.mark.invariant("duplicate-delivery-is-no-conflict", "killed-worker-runs-again")
def test_the_copy_runs_after_its_holders_worker_was_killed(tmp_path, show):
    with running_environment(tmp_path, workers=2, concurrency=2, conf=REDELIVERING) as made:
        environment = show(made)
        holding = environment.hold(environment.tasks.short_lived, environment.fresh())
        put_back(environment, holding.id)
        # Until a worker has noted what it popped, a kill loses it: the Redis transport's own limit.
        eventually(lambda: "dlock" in environment.unacked(holding.id)["headers"])
        (body,) = environment.history(what="in", id=holding.id)
        next(worker for worker in environment.workers if worker.node == body["node"]).kill()
        environment.entered(40, id=holding.id, count=2)
        environment.open(holding.gate)  # not before: the dead body may still listen at its gate
        assert holding.result.get(timeout=15) == holding.n
        second = environment.history(what="in", id=holding.id)[1]
        assert second["token"] > body["token"]
        assert second["node"] != body["node"]
        environment.wait_until_drained(30)
        assert len(environment.history(what="in", id=holding.id)) == 2


@pytest.mark.slow
@pytest.mark.invariant("killed-worker-runs-again")
def test_message_of_a_killed_greenlet_worker_is_delivered_to_another_one(tmp_path, show):
    """There, kombu itself looks for overdue messages at a worker's start only."""
    # Longer than the ttl, so that the copy finds the lock free.
    options = {**REDELIVERING["broker_transport_options"], "visibility_timeout": 6}
    conf = {**REDELIVERING, "broker_transport_options": options}
    with running_environment(tmp_path, workers=2, concurrency=2, pool="gevent", conf=conf) as made:
        environment = show(made)
        holding = environment.hold(environment.tasks.short_lived, environment.fresh())
        (body,) = environment.history(what="in", id=holding.id)
        next(worker for worker in environment.workers if worker.node == body["node"]).kill()
        environment.entered(40, id=holding.id, count=2)
        environment.open(holding.gate)  # not before: the dead body may still listen at its gate
        assert holding.result.get(timeout=15) == holding.n
        environment.wait_until_drained(30)


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    """One worker with one slot: its copies queue up behind the body. They are made as soon as may be."""
    options = {**REDELIVERING["broker_transport_options"], "unacked_restore_interval": 0.05}
    conf = {**REDELIVERING, "broker_transport_options": options}
    with running_environment(tmp_path_factory.mktemp("lone"), concurrency=1, conf=conf) as made:
        yield made


@pytest.mark.invariant("duplicate-delivery-is-no-conflict", "visibility-timeout-runs-nothing-twice")
def test_a_copy_that_waited_for_the_very_slot_of_its_holder_does_not_run_after_it(lone, show):
    environment = show(lone)
    holding = environment.hold(environment.tasks.skips_late, environment.fresh())
    # It lies in the queue, so only the watchdog can record that it exists.
    eventually(lambda: environment.broker.llen("celery"), 20)
    assert holding.end() == holding.n
    try:
        environment.wait_for_line(holding.id, "is a duplicate")
    finally:
        environment.open(holding.gate)
    environment.wait_until_drained(30)
    assert len(environment.history(what="in", id=holding.id)) == 1


@pytest.mark.invariant("visibility-timeout-runs-nothing-twice")
def test_holder_near_its_visibility_timeout_marks_its_end_so_its_copy_does_not_run(tmp_path, show):
    # From its second second on the watchdog doubts; when the lock was asked for, nothing was doubtful yet.
    options = {**REDELIVERING["broker_transport_options"], "visibility_timeout": 4, "unacked_restore_interval": 0.05}
    conf = {**REDELIVERING, "broker_transport_options": options}
    with running_environment(tmp_path, concurrency=1, conf=conf) as made:
        environment = show(made)
        holding = environment.hold(environment.tasks.skips_late, environment.fresh())
        (lock,) = environment.lock_keys(environment.tasks.skips_late, holding.n)
        eventually(lambda: environment.locks.hget(lock, "dup"), 10, message="the watchdog left no word")
        # The copy lies in the queue behind the only slot, so it comes when the lock is free and says nothing.
        eventually(lambda: environment.broker.llen("celery"), 20)
        assert holding.end() == holding.n
        try:
            environment.wait_for_line(holding.id, "is a duplicate")
        finally:
            environment.open(holding.gate)
        environment.wait_until_drained(30)
        assert len(environment.history(what="in", id=holding.id)) == 1


@pytest.mark.invariant("visibility-timeout-runs-nothing-twice")
@pytest.mark.parametrize("name", ["skips", "skips_late"])
def test_a_message_whose_eta_is_later_than_its_visibility_timeout_runs_once(lone, show, name):
    environment, n = show(lone), lone.fresh()
    result = getattr(environment.tasks, name).apply_async((n,), countdown=4)
    # While it waits for its ETA it is unacknowledged, however it is acknowledged later.
    eventually(lambda: len(environment.lines(result.id, "received")) >= 2, 10)
    assert result.get(timeout=20) == n
    environment.wait_until_drained(30)
    assert len(environment.history(what="in", id=result.id)) == 1


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """The default visibility timeout; the broker is a server of its own."""
    with running_environment(tmp_path_factory.mktemp("cut_off"), concurrency=2, separate=True) as made:
        yield made


def lose_connections(environment):
    environment.broker.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    environment.broker.execute_command("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")


@pytest.mark.invariant("lost-connection-runs-nothing-twice")
def test_a_message_redelivered_after_a_lost_connection_runs_once(cut_off, show):
    environment = show(cut_off)
    holding = environment.hold(environment.tasks.skips_late, environment.fresh())
    lose_connections(environment)
    put_back(environment, holding.id)
    assert environment.state(holding.id) == "PENDING"
    assert holding.end() == holding.n
    environment.wait_until_drained(30)
    assert environment.state(holding.id) == "SUCCESS"
    assert [fact["what"] for fact in environment.history(id=holding.id)] == ["in", "out"]


@pytest.mark.invariant("killed-worker-runs-again")
def test_copy_runs_if_the_holders_child_was_killed_and_the_message_is_requeued(cut_off, show):
    environment = show(cut_off)
    holding = environment.hold(environment.tasks.comes_back_late, environment.fresh())
    lose_connections(environment)
    put_back(environment, holding.id)
    (body,) = environment.history(what="in", id=holding.id)
    os.kill(body["pid"], signal.SIGKILL)
    environment.entered(20, id=holding.id, count=2)
    environment.open(holding.gate)
    assert holding.result.get(timeout=15) == holding.n
    environment.wait_until_drained(30)
    assert len(environment.history(what="out", id=holding.id)) == 1


class TestStoreAway:
    @pytest.mark.invariant("nothing-runs-unlocked")
    def test_message_without_a_lock_store_is_republished_and_runs_when_the_store_is_back(self, cut_off, show):
        environment = show(cut_off)
        n = environment.fresh()
        environment.lock_server.stop()
        try:
            waiting = environment.tasks.skips.delay(n)
            also_late = environment.tasks.raises_late.delay(n)
            for result in (waiting, also_late):
                put_back(environment, result.id)
            assert {environment.state(waiting.id), environment.state(also_late.id)} == {"PENDING"}
            assert environment.history(n=n) == []
        finally:
            environment.lock_server.start()
        assert waiting.get(timeout=30) == n
        assert also_late.get(timeout=30) == n
        environment.wait_until_drained(30)
        assert len(environment.history(what="in", id=waiting.id)) == 1
        assert len(environment.history(what="in", id=also_late.id)) == 1

    @pytest.mark.invariant("nothing-runs-unlocked")
    def test_a_store_that_is_away_at_the_release_does_not_fail_the_task(self, cut_off, show):
        environment = show(cut_off)
        holding = environment.hold(environment.tasks.skips, environment.fresh())
        environment.lock_server.stop()
        try:
            assert holding.end() == holding.n
        finally:
            environment.lock_server.start()
        # The watchdog repeats what the store did not hear.
        environment.free(environment.tasks.skips, holding.n, 10)
