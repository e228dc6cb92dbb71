"""Messages that the broker delivers twice or late: each call runs once, at its place, and delays no other."""

import re
import time

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_dlock import Lock
from celery_dlock.keys.lock_name import shared_name
from tests.conftest import WORKERS
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A grant is over after a second, and a message that lost two of them becomes a dead letter."""
    conf = {"dlock_grant_timeout": 1, "dlock_grant_attempts": 2}
    with running_environment(tmp_path_factory.mktemp("copies"), concurrency=4, conf=conf) as made:
        yield made


def runs(environment, task_id):
    return len(environment.history(what="in", id=task_id))


@pytest.mark.invariant("queue-order-is-by-rank", "queue-survives-faults")
@pytest.mark.parametrize("flagged", [True, False])
@pytest.mark.parametrize("name", ["early", "late"])
def test_two_copies_of_a_waiter_are_one_waiter(environment, tasks, queue, name, flagged):
    task, n = getattr(tasks, name), environment.fresh()
    holding = environment.hold(task, n)
    result = task.apply_async((n,), queue=queue)
    (message,) = environment.lying(queue)
    environment.consume(queue)
    environment.parked(task, n, result)
    (behind,) = environment.park(task, n)
    environment.deliver_again(message, flagged=flagged)
    eventually(lambda: len(environment.lines(result.id, "is parked|is republished|duplicate")) == 2)
    assert environment.waiters(task, n) == [result.id, behind.id]
    holding.let_go()
    assert [result.get(timeout=10), behind.get(timeout=10)] == [n, n]
    environment.wait_until_drained()
    assert environment.order(n) == [holding.id, result.id, behind.id]


@pytest.mark.invariant("running-message-is-no-waiter")
def test_copy_of_the_holder_is_no_waiter_and_is_dropped_with_its_end(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.late, n)
    results = environment.park(tasks.late, n, 2)
    environment.deliver_again(environment.unacked(holding.id))
    environment.wait_for_line(holding.id, "is a duplicate and is parked")
    assert environment.waiters(tasks.late, n) == [result.id for result in results]
    eventually(lambda: not environment.unacknowledged(holding.id), 5)  # the store has it
    assert environment.state(holding.id) != "QUEUED"
    assert holding.end() == n
    assert [result.get(timeout=10) for result in results] == [n, n]
    environment.wait_until_drained()
    assert environment.order(n) == [holding.id, *(result.id for result in results)]
    assert not environment.lines(holding.id, "is republished")


@pytest.mark.invariant("running-message-is-no-waiter", "killed-worker-runs-again")
def test_copy_of_a_killed_workers_call_runs_before_all_waiters(tmp_path, request):
    with running_environment(tmp_path, workers=2, concurrency=2) as environment:
        request.node.stash[WORKERS] = environment.workers
        tasks, n = environment.tasks, environment.fresh()
        holding = environment.hold(tasks.late_brief, n, expires=3600)
        (body,) = environment.history(what="in", id=holding.id)
        results = environment.park(tasks.late_brief, n, 3)
        message = environment.unacked(holding.id)
        (killed,) = [worker for worker in environment.workers if body["pid"] in worker.children()]
        killed.kill()
        environment.open(holding.gate)
        environment.deliver_again(message)
        environment.wait_for_line(holding.id, "is a duplicate and is parked")
        assert [result.get(timeout=30) for result in (holding.result, *results)] == [n] * 4
        assert environment.order(n) == [holding.id, holding.id, *(result.id for result in results)]


@pytest.mark.core
def test_redelivered_message_of_a_dead_child_runs_again_and_delays_no_waiter(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.comes_back, n, end="die")
    results = environment.park(tasks.comes_back, n, 3)
    holding.let_go()
    environment.entered(id=results[0].id)
    assert environment.handed_over(holding.id, results[0].id) < 1
    assert [result.get(timeout=15) for result in results] == [n] * 3
    assert holding.result.get(timeout=15) == n
    environment.wait_until_drained()
    assert [runs(environment, result.id) for result in (holding, *results)] == [2, 1, 1, 1]
    assert [one for one in environment.order(n) if one != holding.id] == [result.id for result in results]


@pytest.mark.invariant("rank-follows-receipt")
def test_a_call_with_an_eta_takes_its_place_at_its_eta(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.early, n)
    later = tasks.early.apply_async((n,), countdown=2)
    (before,) = environment.park(tasks.early, n)
    eventually(lambda: tasks.early.waiting(n).count == 2)
    (after,) = environment.park(tasks.early, n)
    assert environment.waiters(tasks.early, n) == [before.id, later.id, after.id]
    holding.let_go()
    assert [result.get(timeout=10) for result in (before, later, after)] == [n] * 3
    assert environment.order(n) == [result.id for result in (holding, before, later, after)]


@pytest.mark.invariant("failed-grants-pass-on")
@pytest.mark.core
def test_untaken_grant_passes_on_and_its_message_runs_when_it_arrives(environment, tasks, queue):
    n = environment.fresh()
    environment.consume(queue)
    holding = environment.hold(tasks.early, n)
    (far,) = environment.park(tasks.early, n, queue=queue)
    near = environment.park(tasks.early, n, 2)
    environment.ignore(queue)
    holding.end()
    assert [result.get(timeout=15) for result in near] == [n, n]
    assert runs(environment, far.id) == 0
    environment.consume(queue)
    assert far.get(timeout=10) == n
    environment.wait_until_drained()
    assert environment.order(n) == [result.id for result in (holding, *near, far)]


@pytest.mark.invariant("failed-grants-pass-on")
def test_waiter_with_failed_grants_is_a_dead_letter_and_runs_when_it_arrives(environment, tasks, queue):
    n = environment.fresh()
    environment.consume(queue)
    holding = environment.hold(tasks.early, n)
    (far,) = environment.park(tasks.early, n, queue=queue)
    environment.ignore(queue)
    holding.end()
    eventually(lambda: environment.dead_letters(tasks.early, n) == 1, 20, message="it is not buried")
    pattern = rf"ERROR/.*{re.escape(tasks.early.lock_name(n))}: a message was granted 2 times and not started"
    eventually(lambda: re.search(pattern, environment.worker.log()))
    assert tasks.early.waiting(n).count == 0
    (fresh,) = [tasks.early.delay(n)]
    assert fresh.get(timeout=10) == n
    environment.consume(queue)
    assert far.get(timeout=10) == n
    environment.wait_until_drained()
    assert environment.dead_letters(tasks.early, n) == 0
    assert environment.order(n) == [holding.id, fresh.id, far.id]


def test_lock_object_in_a_program_gets_the_lock_after_the_last_waiter(environment, tasks):
    n = environment.fresh()
    holding = environment.hold(tasks.shared, n)
    results = environment.park(tasks.shared, n, 2)
    lock = Lock(n, app=environment.app)
    holding.let_go()
    assert lock.acquire(timeout=10)
    assert [result.state for result in results] == ["SUCCESS", "SUCCESS"]
    lock.release()


@pytest.fixture
def foreign_app(environment):
    """An app of the same broker, results and locks, that knows none of the tasks."""
    app = Celery("foreign_app", broker=environment.urls.broker, backend=environment.urls.result)
    app.conf.dlock_url = environment.urls.lock
    # Celery announces every task of this process to it.
    app.finalize()
    for name in [name for name in app.tasks if name.startswith("queueing.")]:
        del app.tasks[name]
    yield app
    app.close()


@pytest.mark.parametrize("expires", [60, 3])
def test_foreign_process_that_hands_off_loses_no_message(environment, tasks, foreign_app, expires):
    n = environment.fresh()
    assert shared_name(n).text == tasks.shared.lock_name(n)
    with Lock(n, app=foreign_app):
        (first,) = environment.park(tasks.shared, n, expires=expires)
        (second,) = environment.park(tasks.shared, n)
        deadline = time.time() + 3.05
        eventually(lambda: expires > 3 or time.time() > deadline)
    assert second.get(timeout=10) == n
    if expires > 3:
        assert first.get(timeout=10) == n
    else:
        with pytest.raises(TaskRevokedError, match="expired"):
            first.get(timeout=5)
