"""``stop`` with seconds at work: a body that does not stop is killed, and its call ends as every replaced one."""

import itertools
import json
import random
import signal
import time
from contextlib import ExitStack, suppress

import pytest
from celery import chain, chord
from celery.exceptions import ChordError, TaskRevokedError, TimeLimitExceeded
from kombu.transport.redis import Channel

from celery_dlock import CallSkipped
from tests.support.environments.queueing import running_environment
from tests.support.polling import eventually
from tests.support.workers import running_worker

pytestmark = pytest.mark.invariant("newest-call-stops-the-running-one")

APP = "tests.support.apps.replacing"
#: Seconds of a body that is to be killed. It ends by itself before the test times out.
LONG = 40
#: Seconds within which a killed call has its end. Celery looks for dead children every 5 s.
ENDED = 20


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("kill"), "-E", app=APP, concurrency=3) as made:
        made.pool = "prefork"
        yield made


def started(environment, task, *args, **kwargs):
    """Send a call, and wait until its body has begun."""
    result = task.delay(*args, **kwargs)
    environment.entered(id=result.id)
    return result


def ended_by(older, newer):
    with pytest.raises(CallSkipped) as ended:
        older.get(timeout=ENDED)
    assert f"replaced by {newer.id}" in str(ended.value)
    assert ended.value.task_id == newer.id


def ran_after(environment, older, newer):
    """The newer body entered after the last sign of life of the older one, which has run once."""
    (entered,) = environment.history(id=newer.id, what="in")
    assert float(environment.client.get(f"beat:{older.id}")) < entered["at"]
    assert len(environment.history(id=older.id, what="in")) == 1


def no_crash_is_logged(environment, older):
    text = "\n".join(worker.log() for worker in environment.workers)
    assert environment.lines(older.id, "is killed with pool child")
    assert environment.lines(older.id, "is stopped: .*replaced by")
    assert not environment.lines(older.id, "ERROR")
    assert "exited with 'signal 9" not in text


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("killed", "deaf"),
        ("killed_early", "stubborn"),
        *(
            pytest.param(kind, how, marks=pytest.mark.slow)
            for kind, how in [
                ("killed", "stubborn"),
                ("killed_early", "deaf"),
                ("killed_at_once", "deaf"),
                ("killed_at_once", "stubborn"),
            ]
        ),
    ],
)
def test_body_that_does_not_stop_is_killed_and_the_newest_call_runs(environment, tasks, kind, how):
    n, task = environment.fresh(), getattr(tasks, kind)
    older = started(environment, task, n, LONG, how)
    newer = task.delay(n, 0.1)
    assert newer.get(timeout=ENDED) == n
    ended_by(older, newer)
    ran_after(environment, older, newer)
    assert not environment.history(id=older.id, what="out")
    environment.free(task, n)
    environment.wait_until_drained()
    no_crash_is_logged(environment, older)


@pytest.mark.slow
def test_kill_is_shown_to_monitors_as_a_revocation(environment, tasks):
    n, heard = environment.fresh(), []
    with environment.app.connection_for_read() as connection:
        receiver = environment.app.events.Receiver(connection, handlers={"*": heard.append})
        with receiver.consumer_context(wakeup=False) as (consumer, _, _):

            def of_older():
                with suppress(TimeoutError):
                    consumer.drain_events(timeout=0.1)
                return kinds(heard, older)

            with suppress(TimeoutError):
                consumer.drain_events(timeout=0.1)  # over Redis it hears nothing before it has listened once
            older = started(environment, tasks.killed, n, LONG, "stubborn")
            newer = tasks.killed.delay(n, 0.1)
            eventually(lambda: {"dlock-skipped", "task-revoked"} <= set(of_older()), ENDED, message="not heard of")
    ended_by(older, newer)
    assert "task-failed" not in kinds(heard, older)
    (revoked,) = [event for event in heard if event["type"] == "task-revoked" and event["uuid"] == older.id]
    assert (revoked["terminated"], revoked["signum"]) == (True, signal.SIGKILL)


def kinds(heard, older):
    return [event["type"] for event in heard if event.get("uuid") == older.id]


def test_body_that_ends_within_its_grace_is_not_killed(environment, tasks):
    """It cleans up for 2.5 s."""
    n = environment.fresh()
    older = started(environment, tasks.spared, n, LONG, "", "tidy")
    newer = tasks.spared.delay(n, 0.1)
    ended_by(older, newer)
    assert len(environment.history(id=older.id, what="cleaned")) == 1
    assert newer.get(timeout=ENDED) == n
    assert not environment.lines(older.id, "is killed")


@pytest.mark.slow
def test_body_that_cleans_up_for_longer_than_its_grace_is_killed(environment, tasks):
    n = environment.fresh()
    older = started(environment, tasks.killed, n, LONG, "", "tidy")
    newer = tasks.killed.delay(n, 0.1)
    assert newer.get(timeout=ENDED) == n
    ended_by(older, newer)
    assert not environment.history(id=older.id, what="cleaned")


def test_body_that_returns_within_its_grace_has_its_result(environment, tasks):
    n = environment.fresh()
    older = started(environment, tasks.spared, n, 4, "deaf")
    newer = tasks.spared.delay(n, 0.1)
    assert older.get(timeout=15) == n
    assert newer.get(timeout=15) == n


def test_killed_call_ends_its_canvas(environment, tasks):
    n = environment.fresh()
    older = chain(tasks.killed.si(n, LONG, "stubborn"), tasks.plain.si("next")).apply_async()
    member = chord([tasks.killed.si(environment.fresh(), LONG, "stubborn")], tasks.plain.s()).apply_async()
    environment.entered(id=older.parent.id)
    inside = member.parent.results[0]
    (entered,) = environment.entered(id=inside.id)
    newer, other = tasks.killed.delay(n), tasks.killed.delay(entered["n"])
    ended_by(older.parent, newer)
    ended_by(inside, other)
    with pytest.raises(TaskRevokedError):
        older.get(timeout=ENDED)
    with pytest.raises((ChordError, TaskRevokedError)):
        member.get(timeout=ENDED)
    assert (newer.get(timeout=10), other.get(timeout=10)) == (n, entered["n"])


@pytest.mark.slow
def test_time_limit_within_the_grace_ends_the_call_as_always(environment, tasks):
    n = environment.fresh()
    older = started(environment, tasks.limited, n, LONG, "stubborn")
    newer = tasks.limited.delay(n, 0.1)
    assert newer.get(timeout=ENDED) == n
    with pytest.raises(TimeLimitExceeded):
        older.get(timeout=ENDED)
    ran_after(environment, older, newer)
    environment.wait_until_drained()


@pytest.mark.slow
def test_body_that_a_revocation_did_not_end_is_killed(environment, tasks):
    n = environment.fresh()
    older = started(environment, tasks.killed, n, LONG, "stubborn")
    environment.app.control.revoke(older.id, terminate=True)
    eventually(lambda: environment.state(older.id) == "REVOKED", 10, message="it is not revoked")
    newer = tasks.killed.delay(n, 0.1)
    assert newer.get(timeout=ENDED) == n
    ran_after(environment, older, newer)
    assert environment.state(older.id) == "REVOKED"
    environment.wait_until_drained()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"stop": "raise"}, {"stop": "ask"}])
def test_options_of_the_running_call_decide_about_its_kill(environment, tasks, options):
    n = environment.fresh()
    older = tasks.killed.apply_async((n, 5, "deaf"), dlock=options)
    environment.entered(id=older.id)
    newer = tasks.killed.delay(n, 0.1)
    assert newer.get(timeout=ENDED) == n
    if options:
        assert older.get(timeout=5) == n
    else:
        ended_by(older, newer)


@pytest.mark.parametrize("seconds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_task_of_another_name_is_never_struck(environment, tasks, seconds):
    """Bodies end at about the time of their kill. Their children go on with tasks that must not be killed."""
    names, chance = [environment.fresh() for _ in range(2)], random.Random(1)
    calls, bystanders = [], []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        calls += [tasks.killed_at_once.delay(n, chance.uniform(0.5, 2.5), "deaf") for n in names]
        bystanders += [tasks.bystander.delay(0.02) for _ in range(4)]
        time.sleep(0.4)
    for result in bystanders:
        assert result.get(timeout=60) == 0.02
    for result in calls:
        eventually(lambda one=result: environment.state(one.id) in ("SUCCESS", "REVOKED"), 60, message="no end")
    killed = {result.id for result in calls if environment.lines(result.id, "is killed")}
    assert killed
    assert {environment.state(task_id) for task_id in killed} == {"REVOKED"}
    returned = {note["id"] for note in environment.history(what="returned")}
    assert not killed & returned
    assert {environment.state(task_id) for task_id in returned & {result.id for result in calls}} == {"SUCCESS"}


# What may happen within the grace. Each has a worker of its own.


#: A message of a killed worker is delivered again after 5 s.
RESTORING = {"visibility_timeout": 5, "unacked_restore_interval": 0.5, "unacked_mutex_expire": 1}
CONF = {"broker_transport_options": RESTORING}


@pytest.fixture
def own(tmp_path, request):
    """An environment of one test, with ``start``: it starts one more worker."""
    args, conf = getattr(request, "param", ((), CONF))
    with ExitStack() as stack:
        made = stack.enter_context(
            running_environment(tmp_path, *args, app=APP, concurrency=2, conf=conf, separate=True)
        )

        def start():
            environ = {"DLOCK_TEST_CONF": json.dumps(CONF)}
            worker = running_worker(APP, folder=tmp_path, urls=made.urls, concurrency=2, environ=environ)
            made.workers.append(stack.enter_context(worker))

        made.start = start
        yield made


def asked_to_stop(own, task):
    """A body that was asked to stop and does not, and the newer call."""
    n = own.fresh()
    older = started(own, task, n, LONG, "deaf")
    newer = task.delay(n, 0.1)
    eventually(lambda: own.history(id=older.id, what="stopped"), 15, message="it is not asked to stop")
    return n, older, newer


@pytest.mark.parametrize("kind", ["killed", pytest.param("killed_early", marks=pytest.mark.slow)])
def test_warm_shutdown_waits_for_the_kill(own, kind):
    n, older, newer = asked_to_stop(own, getattr(own.tasks, kind))
    assert own.worker.stop() == 0
    ended_by(older, newer)
    own.start()
    assert newer.get(timeout=30) == n
    ran_after(own, older, newer)
    own.wait_until_drained()


@pytest.mark.slow
def test_cold_shutdown_within_the_grace(own):
    n, older, newer = asked_to_stop(own, own.tasks.spared)
    own.worker.signal(signal.SIGQUIT)
    own.worker.process.wait(30)
    own.start()
    assert newer.get(timeout=40) == n
    ended_by(older, newer)
    ran_after(own, older, newer)
    own.wait_until_drained()


def test_death_of_the_worker_within_the_grace(own):
    n, older, newer = asked_to_stop(own, own.tasks.spared)
    own.worker.kill()
    own.start()
    assert newer.get(timeout=40) == n
    if not hasattr(Channel, "unacked_restore_interval"):
        # Before 5.7, kombu looks for messages of dead workers at a worker's start, and then only after 100 s.
        time.sleep(RESTORING["visibility_timeout"])
        own.start()
    ended_by(older, newer)
    ran_after(own, older, newer)
    own.wait_until_drained()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "killed_early"])
def test_lost_connections_within_the_grace(own, kind):
    """A message that is acknowledged late is delivered again while its body runs."""
    n, older, newer = asked_to_stop(own, getattr(own.tasks, kind))
    own.client.client_kill_filter(_type="normal", skipme=True)
    assert newer.get(timeout=40) == n
    ended_by(older, newer)
    ran_after(own, older, newer)
    own.wait_until_drained()


@pytest.mark.slow
def test_store_that_is_away_during_the_grace(own):
    n, older, newer = asked_to_stop(own, own.tasks.killed)
    own.lock_server.stop()
    with pytest.raises(CallSkipped):
        older.get(timeout=ENDED)
    own.lock_server.start()
    assert newer.get(timeout=40) == n
    ran_after(own, older, newer)
    own.wait_until_drained()


# The worker lives. A message that is delivered again would count as received again, so an older call could become the
# newest one. Under load, calls wait in the worker for longer than RESTORING allows.
EACH = (("--max-tasks-per-child", "1"), {})
SCALED = (("--autoscale", "4,1"), {})


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("own", "count"),
    [(EACH, 10), pytest.param(EACH, 60, marks=pytest.mark.slow), pytest.param(SCALED, 60, marks=pytest.mark.slow)],
    indirect=["own"],
)
def test_newest_call_of_a_burst_runs_although_no_body_stops(own, count):
    n, calls = own.fresh(), []
    for _ in range(count):
        calls.append(own.tasks.killed.delay(n, LONG, "stubborn"))
        time.sleep(0.2)
    calls.append(own.tasks.killed.delay(n, 0.1))
    # The worker starts two children a second at most, and each takes one call.
    assert calls[-1].get(timeout=40 + 3 * count) == n
    for result in calls[:-1]:
        with pytest.raises(CallSkipped):
            result.get(timeout=ENDED)
    entered = own.history(n=n, what="in")
    assert len(entered) == len({note["id"] for note in entered})
    for older, newer in itertools.pairwise(entered):
        assert float(own.client.get(f"beat:{older['id']}")) < newer["at"]
    own.free(own.tasks.killed, n)
    own.wait_until_drained()


@pytest.mark.parametrize(("pool", "works_as"), [("threads", "raise"), ("solo", "ask")])
def test_pool_that_cannot_kill_says_so_at_its_start_and_the_newest_call_waits(tmp_path, pool, works_as):
    with running_environment(tmp_path, app=APP, pool=pool, concurrency=2) as made:
        line = made.worker.wait_for_log(r"seconds for stop of (.*) work as '(\w+)': the pool (\S+) cannot kill a body")
        assert "replacing.killed" in line[1].split(", ")
        assert line[2] == works_as
        n = made.fresh()
        older = started(made, made.tasks.killed_at_once, n, 3, "deaf")
        newer = made.tasks.killed_at_once.delay(n, 0.1)
        assert (older.get(timeout=15), newer.get(timeout=15)) == (n, n)
        assert made.overlaps(n) == 1


@pytest.mark.slow
def test_end_that_cannot_be_stored_is_stored_by_the_next_delivery(own):
    """The result backend refuses when the killed call has to end. Its message is requeued."""
    n, older, newer = asked_to_stop(own, own.tasks.killed)
    key = f"celery-task-meta-{older.id}"
    own.client.rpush(key, "of a type that the result backend cannot read")
    own.wait_for_line(older.id, "its end cannot be stored", within=30)
    own.client.delete(key)
    ended_by(older, newer)
    assert newer.get(timeout=40) == n
    ran_after(own, older, newer)
    own.wait_until_drained()
