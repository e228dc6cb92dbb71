"""The result backend does not answer: that decides about no call, and ends are stored when it answers again."""

import json
from contextlib import ExitStack

import pytest
from celery import Celery

from tests.support.environments.queueing import APP, running_environment
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.workers import running_worker

#: A busy machine, and the retries of the Redis driver.
WITHIN = 40


class Results:
    """The result backend, on a server of its own, and a publisher that does not use it."""

    def __init__(self, server, broker_url):
        self.server = server
        self.publisher = Celery(broker=broker_url, set_as_current=False)

    def send(self, task, *args, **options):
        return self.publisher.send_task(task.name, args, **options).id

    def state(self, task_id):
        with self.server.client() as client:
            stored = client.get(f"celery-task-meta-{task_id}")
        return json.loads(stored)["status"] if stored else "PENDING"

    def ends(self, task_id, state):
        eventually(lambda: self.state(task_id) == state, WITHIN, message=f"{task_id} is {self.state(task_id)}")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("away")
    with Server(folder / "results") as server, ExitStack() as stack:
        conf = {"result_backend": server.url(), "task_track_started": True}
        made = stack.enter_context(running_environment(folder, conf=conf, concurrency=3))
        made.results = Results(server, made.urls.broker)
        made.conf = conf
        yield made


@pytest.fixture
def results(environment):
    """The result backend. It answers again after the test."""
    server = environment.results.server
    yield environment.results
    if not server.running:
        server.start()
    server.resume()


STOPS = {"stopped": ("stop", "start"), "paused": ("pause", "resume")}


@pytest.mark.invariant("informing-decides-nothing")
@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("name", ["early", "late"])
def test_call_is_parked_and_runs_although_no_state_can_be_stored(environment, tasks, results, name, how):
    task, n = getattr(tasks, name), environment.fresh()
    away, back = (getattr(results.server, step) for step in STOPS[how])
    lock = task.lock_for(n)
    assert lock.acquire()
    away()
    ids = []
    for _ in range(2):
        ids.append(results.send(task, n))
        eventually(lambda: environment.waiters(task, n) == ids, WITHIN)
    if name == "early":
        eventually(lambda: not any(map(environment.unacknowledged, ids)), WITHIN, message="the calls are parked")
    back()
    lock.release()
    environment.entered(within=WITHIN, id=ids[1])
    assert environment.order(n) == ids
    for task_id in ids:
        results.ends(task_id, "SUCCESS")
    environment.wait_until_drained()


@pytest.mark.invariant("informing-decides-nothing")
def test_granted_call_runs_although_its_start_cannot_be_stored(environment, tasks, results):
    """It is a task of `task_track_started`."""
    n = environment.fresh()
    lock = tasks.late.lock_for(n)
    assert lock.acquire()
    parked = results.send(tasks.late, n)
    results.ends(parked, "QUEUED")
    results.server.stop()
    lock.release()
    environment.entered(within=WITHIN, id=parked)


@pytest.mark.invariant("ends-are-tried-again")
def test_ends_are_stored_when_the_result_backend_is_back(environment, tasks, results):
    """A pool child stores the end of a skipped call, and the queue sweeper that of a revoked waiter."""
    m, n = environment.fresh(), environment.fresh()
    held = [task.lock_for(name) for task, name in ((tasks.shared, m), (tasks.early, n))]
    for lock in held:
        assert lock.acquire()
    revoked, behind = (results.send(tasks.early, n) for _ in range(2))
    for task_id in (revoked, behind):
        results.ends(task_id, "QUEUED")
    results.server.stop()
    environment.app.control.revoke(revoked)
    eventually(lambda: environment.waiters(tasks.early, n) == [behind], WITHIN, message="the waiter is not taken out")
    environment.wait_for_line(revoked, "its end cannot be stored; retrying", WITHIN)
    skipped = results.send(tasks.shared_skips, m)
    environment.wait_for_line(skipped, "skipped: ", WITHIN)
    results.server.start()
    for task_id in (skipped, revoked):
        results.ends(task_id, "REVOKED")
    for lock in held:
        lock.release()
    results.ends(behind, "SUCCESS")


@pytest.mark.invariant("queued-state-hides-no-end")
@pytest.mark.parametrize(("end", "state"), [("", "SUCCESS"), ("fail", "FAILURE")])
def test_late_queued_state_does_not_replace_the_end(environment, tasks, results, tmp_path, end, state):
    """The worker that parks the call reaches the result backend only after another worker has run the call."""
    task, n, queue = tasks.early, environment.fresh(), f"slow-{environment.fresh()}"
    with Proxy(results.server.port) as proxy:
        conf = {**environment.conf, "result_backend": proxy.url()}
        environ = {"DLOCK_TEST_CONF": json.dumps(conf)}
        with running_worker(
            APP, "-Q", queue, folder=tmp_path, urls=environment.urls, concurrency=1, environ=environ
        ) as slow:
            lock = task.lock_for(n)
            assert lock.acquire()
            proxy.set_mode("blackhole")
            parked = results.send(task, n, "", end, queue=queue)
            eventually(lambda: environment.waiters(task, n) == [parked], WITHIN)
            control = environment.app.control
            assert control.cancel_consumer(queue, destination=[slow.node], reply=True, timeout=5)
            assert control.add_consumer(queue, destination=[environment.worker.node], reply=True, timeout=5)
            lock.release()
            results.ends(parked, state)
            proxy.set_mode("pass")
            slow.wait_for_log(f"{parked}.* is parked", WITHIN)
            slow.stop()
    assert results.state(parked) == state
