"""The public view of a waiting task, and the end of one that is not to run any more."""

import json
import re
import time
from contextlib import contextmanager, suppress

import pytest
from celery import chain, chord, group, states
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError

from celery_dlock import CallSkipped
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually
from tests.support.workers import running_worker


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Its worker sends events."""
    with running_environment(tmp_path_factory.mktemp("waiting"), "-E", concurrency=4) as made:
        yield made


@contextmanager
def watched(app, kind):
    """Every event of that kind."""
    heard = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={kind: heard.append})
        with receiver.consumer_context(wakeup=False) as (own, _, _):

            def look():
                with suppress(TimeoutError):
                    own.drain_events(timeout=0.1)
                return heard

            look()  # over Redis it hears nothing before it has listened once
            yield look


class TestSeen:
    @pytest.mark.invariant("queued-state-hides-no-end")
    @pytest.mark.core
    def test_its_state_is_queued_with_its_position_and_get_waits_on(self, environment, tasks):
        n = environment.fresh()
        holding = environment.hold(tasks.early, n)
        first, second = (environment.park(tasks.early, n)[0] for _ in range(2))
        eventually(lambda: (first.state, second.state) == ("QUEUED", "QUEUED"))
        assert [result.info["position"] for result in (first, second)] == [1, 2]
        assert f"held by queueing.early[{holding.id}] on {environment.worker.node}" in first.info["reason"]
        assert not second.ready()
        with pytest.raises(CeleryTimeoutError):
            second.get(timeout=0.5)
        holding.let_go()
        assert second.get(timeout=10) == n
        assert first.state == second.state == "SUCCESS"

    @pytest.mark.invariant("queued-state-hides-no-end")
    def test_waiting_says_how_many_who_by_rank_and_since_when(self, environment, tasks):
        n = environment.fresh()
        assert tasks.early.waiting(n).count == 0
        assert tasks.early.waiting(n).waiters == ()
        holding = environment.hold(tasks.early, n)
        before = time.time()
        results = [environment.park(tasks.early, n)[0] for _ in range(3)]
        after = time.time()
        waiting = tasks.early.waiting(n)
        assert waiting.count == 3
        assert [waiter.task_id for waiter in waiting.waiters] == [result.id for result in results]
        assert {waiter.task for waiter in waiting.waiters} == {"queueing.early"}
        sinces = [waiter.since for waiter in waiting.waiters]
        assert [before - 0.1, *sinces, after + 0.1] == sorted([before - 0.1, *sinces, after + 0.1])
        assert tasks.early.waiting(environment.fresh()).count == 0
        holding.let_go()
        results[-1].get(timeout=10)
        assert tasks.early.waiting(n).count == 0

    def test_the_signal_and_the_event_tell_it_once_and_no_argument(self, environment, tasks):
        n = environment.fresh()
        with watched(environment.app, "dlock-queued") as look:
            with environment.hold(tasks.early, n):
                (result,) = environment.park(tasks.early, n, 1, "", "", "s3cret")
                eventually(look)
            result.get(timeout=10)
            # The release and the second delivery are in the store by then.
            events = [event for event in look() if event["uuid"] == result.id]
        (signal,) = environment.history(what="queued", id=result.id)
        (event,) = events
        assert signal["task"] == "queueing.early"
        assert signal["name"] == event["name"] == tasks.early.lock_name(n)
        assert signal["reason"] == event["reason"]
        assert event["reason"].endswith("position 1 in the queue")
        assert event["hostname"] == environment.worker.node
        assert "s3cret" not in json.dumps(event) + json.dumps(signal) + environment.worker.log()

    def test_an_ignored_result_gets_no_state(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.early, n):
            (result,) = environment.park(tasks.early, n, ignore_result=True)
            assert environment.state(result.id) == "PENDING"
        environment.entered(id=result.id)

    @pytest.mark.redis_store("it looks at Redis keys")
    def test_no_key_holds_an_argument(self, environment, tasks):
        n = environment.fresh() + "-s3cret"
        with environment.hold(tasks.early, n):
            environment.park(tasks.early, n)
            keys = environment.locks.keys("dlock*")
            assert keys
            assert not [key for key in keys if "s3cret" in key]


class TestCanvas:
    @pytest.mark.parametrize("serializer", ["json", "pickle"])
    @pytest.mark.parametrize("name", ["early", "late"])
    def test_a_chain_a_group_and_a_chord_of_parked_tasks_complete(self, environment, tasks, name, serializer):
        task = getattr(tasks, name)
        m, n = environment.fresh(), environment.fresh()
        one, two = environment.hold(task, m), environment.hold(task, n)
        of = {n: task.si(n).set(serializer=serializer), m: task.si(m).set(serializer=serializer)}
        results = [
            chain(of[m], of[n], tasks.plain.s()).apply_async(),
            group(of[m], of[n], of[n]).apply_async(),
            chord([of[m], of[n], of[n]], of[m]).apply_async(),
            chord(group(chain(of[m], of[n]), of[n]), tasks.plain.s()).apply_async(),
        ]
        eventually(lambda: task.waiting(m).count == 4, message=f"{task.waiting(m)}")
        eventually(lambda: task.waiting(n).count == 5, message=f"{task.waiting(n)}")
        one.let_go()
        two.let_go()
        assert [result.get(timeout=20) for result in results] == [n, [m, n, n], m, [n, n]]
        for lock in (m, n):
            assert environment.overlaps(lock) == 1
            ids = environment.order(lock)
            assert len(ids) == len(set(ids))

    @pytest.mark.parametrize("name", ["early", "late"])
    def test_a_chain_and_a_chord_of_one_name_complete(self, environment, tasks, name):
        task, n = getattr(tasks, name), environment.fresh()
        step = task.si(n)
        holding = environment.hold(task, n)
        results = [chain(step, step, step).apply_async(), chord([step, step, step], step).apply_async()]
        eventually(lambda: task.waiting(n).count == 4, message=f"{task.waiting(n)}")
        holding.let_go()
        assert [result.get(timeout=20) for result in results] == [n, n]
        ids = environment.order(n)
        assert len(ids) == len(set(ids)) == 8
        assert environment.overlaps(n) == 1

    def test_links_and_errbacks_of_a_parked_task_run(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.early, n):
            (linked,) = environment.park(tasks.early, n, link=tasks.plain.si(f"link {n}"))
            (failed,) = environment.park(tasks.early, n, 1, "", "fail", link_error=tasks.failed_link.s())
        assert linked.get(timeout=10) == n
        with pytest.raises(ValueError, match="as asked"):
            failed.get(timeout=10)
        eventually(lambda: [f for f in environment.history(what="plain") if f"link {n}" in f["args"]])
        eventually(lambda: environment.history(what="link_error", id=failed.id))


class TestEnded:
    def ends_revoked(self, environment, result, pattern, within=5.0):
        with pytest.raises(TaskRevokedError, match=pattern) as revoked:
            result.get(timeout=within)
        assert not isinstance(revoked.value, CallSkipped)
        # What follows a task is stored behind it, and its get() raises already for what was stored before it.
        eventually(lambda: environment.state(result.id) == "REVOKED")
        assert environment.history(what="in", id=result.id) == []

    @pytest.mark.invariant("removed-waiters-end-revoked")
    @pytest.mark.core
    @pytest.mark.parametrize("name", ["early", "late"])
    def test_a_revoked_waiter_ends_at_once_and_those_behind_it_run(self, environment, tasks, name):
        task, n = getattr(tasks, name), environment.fresh()
        holding = environment.hold(task, n)
        results = [environment.park(task, n)[0] for _ in range(4)]
        for result in results[:1] + results[2:3]:
            result.revoke()
            self.ends_revoked(environment, result, "revoked")
        assert environment.waiters(task, n) == [results[1].id, results[3].id]
        assert environment.order(n) == [holding.id]
        holding.let_go()
        assert [results[1].get(timeout=10), results[3].get(timeout=10)] == [n, n]
        assert environment.order(n) == [holding.id, results[1].id, results[3].id]

    @pytest.mark.invariant("removed-waiters-end-revoked")
    def test_its_chain_and_its_chord_end_with_it(self, environment, tasks):
        n = environment.fresh()
        holding = environment.hold(tasks.early, n)
        followed = chain(tasks.early.si(n), tasks.plain.s()).apply_async()
        environment.parked(tasks.early, n, followed.parent)
        whole = chord([tasks.early.si(n), tasks.plain.si("x")], tasks.plain.s()).apply_async()
        eventually(lambda: tasks.early.waiting(n).count == 2)
        for task_id in environment.waiters(tasks.early, n):
            environment.app.control.revoke(task_id)
        self.ends_revoked(environment, followed, "revoked")
        whole.get(timeout=10, propagate=False)
        assert whole.state == states.FAILURE
        holding.end()
        assert environment.order(n) == [holding.id]

    @pytest.mark.invariant("removed-waiters-end-revoked")
    def test_waiter_revoked_while_its_message_is_in_transit_hands_off(self, environment, tasks):
        """It lies in a queue without a reader when it is granted the lock."""
        n, queue = environment.fresh(), f"far-{environment.fresh()}"
        environment.consume(queue)
        holding = environment.hold(tasks.early, n)
        (first,) = environment.park(tasks.early, n, queue=queue)
        (second,) = environment.park(tasks.early, n)
        environment.ignore(queue)
        holding.end()
        eventually(lambda: environment.lying(queue))
        first.revoke()
        self.ends_revoked(environment, first, "revoked")
        assert second.get(timeout=10) == n
        environment.consume(queue)
        environment.wait_until_drained()
        assert environment.order(n) == [holding.id, second.id]

    @pytest.mark.invariant("removed-waiters-end-revoked")
    @pytest.mark.parametrize("name", ["early", "late"])
    def test_waiter_that_expires_ends_revoked_at_its_grant_and_later_waiters_run(self, environment, tasks, name):
        task, n = getattr(tasks, name), environment.fresh()
        holding = environment.hold(task, n)
        short = [environment.park(task, n, expires=3)[0] for _ in range(2)]
        (lasting,) = environment.park(task, n, expires=60)
        (after,) = environment.park(task, n)
        deadline = time.time() + 3.05
        eventually(lambda: time.time() > deadline)
        holding.let_go()
        for result in short:
            self.ends_revoked(environment, result, "expired")
        assert [lasting.get(timeout=10), after.get(timeout=10)] == [n, n]
        assert environment.order(n) == [holding.id, lasting.id, after.id]

    @pytest.mark.core
    @pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
    def test_terminated_holder_hands_off_within_a_second(self, environment, tasks, signal):
        n = environment.fresh()
        holding = environment.hold(tasks.early, n)
        (result,) = environment.park(tasks.early, n)
        (fact,) = environment.history(what="in", id=holding.id)
        environment.app.control.revoke(holding.id, terminate=True, signal=signal)
        # How long the child lives on is Celery's share.
        eventually(lambda: fact["pid"] not in environment.worker.children(), 10)
        environment.entered(id=result.id, within=1)
        assert result.get(timeout=10) == n
        assert environment.state(holding.id) == "REVOKED"

    def test_a_terminated_waiter_ends_revoked_and_kills_no_child(self, environment, tasks):
        n = environment.fresh()
        holding = environment.hold(tasks.early, n)
        result, behind = environment.park(tasks.early, n, 2)
        # Where a child was killed just before, Celery may take 5 s to replace it.
        children = eventually(lambda: len(found := sorted(environment.worker.children())) == 4 and found, 10)
        # Until its child has reported back, Celery would still terminate that.
        inspect = environment.app.control.inspect([environment.worker.node], timeout=5)
        eventually(lambda: result.id not in [active["id"] for active in inspect.active()[environment.worker.node]], 10)
        environment.app.control.revoke(result.id, terminate=True)
        self.ends_revoked(environment, result, "revoked")
        assert holding.end() == behind.get(timeout=10) == n
        assert sorted(environment.worker.children()) == children

    def test_a_waiter_behind_many_revoked_ones_runs(self, environment, tasks):
        n = environment.fresh()
        holding = environment.hold(tasks.late, n)
        results = environment.park(tasks.late, n, 30)
        (last,) = environment.park(tasks.late, n)
        environment.app.control.revoke([result.id for result in results])
        holding.let_go()
        assert last.get(timeout=10) == n
        for result in results:
            result.get(timeout=5, propagate=False)
        # What a worker had in its hands when the revocation came may have run, as with any of Celery's tasks.
        assert {environment.state(result.id) for result in results} == {"REVOKED"}
        assert environment.order(n)[-1] == last.id


def test_waiter_revoked_after_its_worker_restarted_ends_at_its_grant(tmp_path):
    """The new worker does not know of it: it discards the message, as it discards every revoked one."""
    with running_environment(tmp_path / "first", concurrency=2) as environment:
        task, n = environment.tasks.late, environment.fresh()
        lock = task.lock_for(n)
        assert lock.acquire()
        revoked, behind = environment.park(task, n, 2)
        environment.worker.stop()
        started = running_worker(
            "tests.support.apps.queueing", folder=tmp_path, urls=environment.urls, environ={"DLOCK_TEST_CONF": "{}"}
        )
        with started as worker:
            environment.workers.append(worker)
            environment.listens()
            revoked.revoke()
            worker.wait_for_log(f"Tasks flagged as revoked: {revoked.id}")
            lock.release()
            assert behind.get(timeout=10) == n
            with pytest.raises(TaskRevokedError):
                revoked.get(timeout=5)
            assert environment.order(n) == [behind.id]


def test_a_store_without_an_append_only_file_is_warned_of_once(environment, tasks):
    assert tasks
    assert len(re.findall("parked in a store that is not durable", environment.worker.log())) == 1


def test_an_app_without_a_result_backend_queues_too(tmp_path):
    with running_environment(tmp_path, concurrency=2, conf={"result_backend": "disabled://"}) as environment:
        n = environment.fresh()
        holding = environment.hold(environment.tasks.early, n)
        results = environment.park(environment.tasks.early, n, 2)
        (revoked,) = environment.park(environment.tasks.early, n)
        revoked.revoke()
        environment.parked(environment.tasks.early, n, *results)
        holding.let_go()
        environment.entered(id=results[-1].id)
        environment.wait_until_drained()
        assert environment.order(n) == [result.id for result in (holding, *results)]
        assert "Traceback" not in environment.worker.log()
