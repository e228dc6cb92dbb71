"""A message that cannot wait fails clearly, and an unreadable one becomes a dead letter. Those behind it go on."""

import json
import re

import pytest
from celery import Celery
from celery.utils import uuid
from kombu import Exchange

from celery_dlock import LockHeld
from celery_dlock.errors import DLockError
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually

# Celery declares no Broadcast where it publishes, and takes its own routing key for one that has none.
FANOUT = {"queue": "everybody", "routing_key": "celery", "declare": [Exchange("everybody", type="fanout")]}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("bad"), concurrency=4) as made:
        yield made


class TestEager:
    @pytest.mark.invariant("unreadable-messages-become-dead-letters")
    @pytest.mark.core
    def test_a_call_that_meets_a_held_lock_fails_and_says_why(self, environment, tasks):
        n = environment.fresh()
        with environment.hold(tasks.early, n) as holding:
            result = tasks.early.apply((n,))
            assert result.state == "FAILURE"
            assert isinstance(result.result, LockHeld)
            assert "an eager call has no message to park" in str(result.result)
            assert holding.id in str(result.result)
            assert tasks.early.waiting(n).count == 0

    def test_eager_call_behind_waiters_fails(self, environment, tasks):
        n, queue = environment.fresh(), f"far-{environment.fresh()}"
        environment.consume(queue)
        holding = environment.hold(tasks.early, n)
        (result,) = environment.park(tasks.early, n, queue=queue)
        environment.ignore(queue)
        holding.end()
        eventually(lambda: environment.lying(queue))
        assert isinstance(tasks.early.apply((n,)).result, LockHeld)
        environment.consume(queue)
        assert result.get(timeout=10) == n
        assert environment.order(n) == [holding.id, result.id]

    def test_eager_call_takes_a_free_lock_and_hands_off(self, environment, tasks):
        n = environment.fresh()
        assert tasks.early.apply((n,)).get() == n
        assert not environment.locked(tasks.early, n)


def fails_alone(environment, task, n, publish, pattern):
    """The message of `publish` fails while the lock is held; one before and one behind it run."""
    holding = environment.hold(task, n)
    (before,) = environment.park(task, n)
    result = publish()
    with pytest.raises(DLockError, match=pattern):
        result.get(timeout=10)
    assert environment.state(result.id) == "FAILURE"
    (behind,) = environment.park(task, n)
    assert environment.waiters(task, n) == [before.id, behind.id]
    holding.let_go()
    assert [before.get(timeout=10), behind.get(timeout=10)] == [n, n]
    assert environment.order(n) == [holding.id, before.id, behind.id]
    environment.wait_until_drained()


@pytest.mark.parametrize("name", ["early", "late"])
class TestUnpublishable:
    def test_a_message_of_a_fanout_exchange_fails(self, environment, tasks, name):
        task, n = getattr(tasks, name), environment.fresh()
        fails_alone(
            environment, task, n, lambda: task.apply_async((n,), **FANOUT), "the queue of this message is unknown"
        )

    @pytest.mark.invariant("unreadable-messages-become-dead-letters")
    def test_a_message_of_protocol_1_fails(self, environment, tasks, name):
        task, n = getattr(tasks, name), environment.fresh()
        old = Celery("old", broker=environment.urls.broker, backend=environment.urls.result)
        old.conf.task_protocol = 1
        try:
            fails_alone(environment, task, n, lambda: sent_by(old, environment, task, n), "protocol 1")
        finally:
            old.close()


class TestGarbage:
    @pytest.mark.invariant("unreadable-messages-become-dead-letters")
    @pytest.mark.core
    @pytest.mark.redis_store("it damages what Redis keeps; the engine's tests damage the rows of a database")
    @pytest.mark.parametrize(
        "garbage", ["", "{", "[]\n{}", '["queueing.early","x"]\n{"body":1}', "\x00\xff", b"\xff\xfe\n\xff", "7"]
    )
    def test_unreadable_entry_becomes_a_dead_letter_and_the_queue_continues(self, environment, tasks, garbage):
        n = environment.fresh()
        holding = environment.hold(tasks.early, n)
        results = [environment.park(tasks.early, n)[0] for _ in range(3)]
        keys = environment.keys(tasks.early, n)
        waiting, parked = keys.queue()[:2]
        second = environment.locks.zrange(waiting, 0, -1)[1]
        assert json.loads(environment.locks.hget(parked, second).partition("\n")[0])[1] == results[1].id
        before = len(errors(environment))
        with environment.server.client(2, decode_responses=False) as raw:
            raw.hset(parked, second, garbage)
        assert tasks.early.waiting(n).count == 3
        holding.let_go()
        assert [results[0].get(timeout=10), results[2].get(timeout=10)] == [n, n]
        assert environment.order(n) == [holding.id, results[0].id, results[2].id]
        with environment.server.client(2, decode_responses=False) as raw:
            assert raw.hgetall(keys.named("dead")) == {
                second.encode(): garbage if isinstance(garbage, bytes) else garbage.encode()
            }
        new = eventually(lambda: errors(environment)[before:])
        assert len(new) == 1
        assert tasks.early.lock_name(n) in new[0]
        assert "cannot be read" in new[0]
        assert keys.named("dead") in new[0]

    def test_an_entry_that_is_gone_is_passed_over(self, environment, tasks):
        n = environment.fresh()
        holding = environment.hold(tasks.early, n)
        results = [environment.park(tasks.early, n)[0] for _ in range(3)]
        waiting, parked = environment.keys(tasks.early, n).queue()[:2]
        environment.locks.hdel(parked, environment.locks.zrange(waiting, 0, 0)[0])
        holding.let_go()
        assert [results[1].get(timeout=10), results[2].get(timeout=10)] == [n, n]

    @pytest.mark.parametrize("kind", [0, 1, 2])
    def test_a_queues_key_of_another_type_fails_its_tasks_loudly_and_no_other_name(self, environment, tasks, kind):
        n, fine = environment.fresh(), environment.fresh()
        key = environment.keys(tasks.late, n).queue()[kind]
        holding = environment.hold(tasks.late, n)
        environment.locks.set(key, "somebody's")
        result = tasks.late.delay(n)
        environment.wait_for_line(result.id, "WRONGTYPE|refused")
        assert tasks.late.delay(fine).get(timeout=10) == fine
        environment.locks.delete(key)
        holding.let_go()
        assert result.get(timeout=20) == n

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("queue", 7),
            ("queue", None),
            ("type", 5),
            ("rank", "x"),
            ("conflict_retries", None),
            ("headers", []),
            ("headers", {"task": "queueing.early"}),
            ("properties", 7),
            ("properties", {"priority": "high", "delivery_mode": {}}),
            ("body", 7),
            ("body", None),
        ],
    )
    def test_entry_of_wrong_types_becomes_a_dead_letter_and_the_queue_continues(self, environment, tasks, field, value):
        n = environment.fresh()
        holding = environment.hold(tasks.early, n)
        results = [environment.park(tasks.early, n)[0] for _ in range(2)]
        keys = environment.keys(tasks.early, n)
        waiting, parked = keys.queue()[:2]
        first = environment.locks.zrange(waiting, 0, 0)[0]
        who, _, facts = environment.locks.hget(parked, first).partition("\n")
        environment.locks.hset(parked, first, f"{who}\n{json.dumps({**json.loads(facts), field: value})}")
        holding.let_go()
        assert results[1].get(timeout=5) == n
        assert environment.order(n) == [holding.id, results[1].id]
        assert environment.locks.hkeys(keys.named("dead")) == [first]


def errors(environment):
    return [line for line in environment.worker.log().splitlines() if re.search(r"(ERROR|CRITICAL)/", line)]


def sent_by(app, environment, task, n):
    task_id = uuid()
    app.send_task(task.name, (n,), task_id=task_id)
    return environment.app.AsyncResult(task_id)
