"""Results and costs of ``unique=`` for a publisher, without a worker."""

import subprocess
import sys

import pytest
from celery import group
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedule
from kombu.exceptions import OperationalError

from celery_dlock import LockHeld, StoreUnavailable
from celery_dlock.errors import LockKeyError
from tests.support.environments.claiming import Claims, urls_of
from tests.support.polling import eventually
from tests.support.processes import HOST, ROOT, free_port
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app

APP = "tests.support.apps.claiming"
#: Celery's own call, with which it stores a result here too.
pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("publishing") / "server") as server:
        yield server


@pytest.fixture
def environment(server):
    server.flush()
    with loaded_app(APP, urls_of(server)) as tasks:
        yield Claims(server, tasks)


def sent(environment) -> int:
    """Messages in the broker's queue; it is emptied."""
    with environment.tasks.app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.queue_declare("celery")
        return channel.queue_purge("celery") or 0


def test_a_refused_call_returns_the_first_calls_result_and_publishes_nothing(environment):
    first = environment.tasks.queued.delay("p1")
    results = [environment.tasks.queued.delay("p1") for _ in range(5)]
    assert [result.id for result in results] == [first.id] * 5
    assert sent(environment) == 1


def test_calls_with_other_names_are_published(environment):
    assert environment.tasks.queued.delay("p2").id != environment.tasks.queued.delay("p3").id
    assert sent(environment) == 2


def test_call_may_choose_unique_for_itself(environment):
    plain, queued = environment.tasks.plain, environment.tasks.queued
    first = plain.apply_async(("p4",), dlock={"unique": "queued"})
    assert plain.apply_async(("p4",), dlock={"unique": "queued"}).id == first.id
    assert plain.delay("p4").id != first.id
    queued.delay("p5")
    with pytest.raises(LockHeld):
        queued.apply_async(("p5",), dlock={"on_duplicate": "raise"})
    assert queued.apply_async(("p5",), dlock={"enabled": False}).id != environment.of(queued, "p5")
    assert sent(environment) == 4


def test_group_member_may_choose_unique_for_itself(environment):
    queued, plain = environment.tasks.queued, environment.tasks.plain
    own = [
        queued.s("p30").set(dlock={"key": "other:{n}"}),
        queued.s("p31").set(dlock={"enabled": False}),
        plain.s("p32").set(dlock={"unique": "queued"}),
    ]
    results = group(own).apply_async()
    assert environment.of(queued, "p30") is None
    assert environment.of(queued, "p31") is None
    assert environment.of(plain, "p32") == results[2].id
    again = queued.apply_async(("p30",), dlock={"key": "other:{n}"})
    assert again.id == results[0].id
    assert sent(environment) == 3


def test_refused_call_with_own_task_id_ends_revoked(environment):
    assert environment.tasks.queued.apply_async(("p6",), task_id="mine").id == "mine"
    assert environment.tasks.queued.apply_async(("p6",), task_id="yours").id == "mine"
    assert environment.tasks.queued.AsyncResult("yours").state == "REVOKED"
    assert environment.tasks.queued.AsyncResult("mine").state == "PENDING"
    sent(environment)


def test_a_refused_call_leaves_the_state_of_an_earlier_call_of_its_id_alone(environment):
    task = environment.tasks.queued
    task.backend.store_result("early", {"pid": 1}, "STARTED")
    with task.lock_for("p16"):
        task.apply_async(("p16",), task_id="first")
        assert task.apply_async(("p16",), task_id="early").id == "first"
    assert task.AsyncResult("early").state == "STARTED"
    sent(environment)


def test_task_id_published_twice_is_one_message(environment):
    for _ in range(2):
        assert environment.tasks.queued.apply_async(("p7",), task_id="same").id == "same"
    assert environment.tasks.queued.AsyncResult("same").state == "PENDING"
    assert sent(environment) == 1


@pytest.mark.invariant("claim-is-released")
def test_failed_publish_releases_its_claim(server):
    nowhere = Urls(f"redis://{HOST}:{free_port()}/0", server.url(1), server.lock_url(2))
    with loaded_app(APP, nowhere) as tasks:
        # Else kombu's transport tries for some seconds.
        tasks.app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
        with pytest.raises(OperationalError):
            tasks.queued.apply_async(("p8",), retry=False)
        assert Claims(server, tasks).of(tasks.queued, "p8") is None
        with pytest.raises(OperationalError):
            group(tasks.queued.s("p9"), tasks.queued.s("p10")).apply_async(retry=False)
        assert [Claims(server, tasks).of(tasks.queued, n) for n in ("p9", "p10")] == [None, None]


@pytest.mark.invariant("no-claim-without-store")
def test_unavailable_store_blocks_publishing_unless_on_store_error_is_run(server, caplog):
    away = Urls(server.url(0), server.url(1), f"redis://{HOST}:{free_port()}/0")
    with loaded_app(APP, away) as tasks:
        environment = Claims(server, tasks)
        with pytest.raises(StoreUnavailable):
            tasks.queued.delay("p11")
        with pytest.raises(StoreUnavailable):
            group(tasks.queued.s("p11"), tasks.unchecked.s("p11")).apply_async()
        assert sent(environment) == 0
        caplog.clear()
        tasks.unchecked.delay("p11")
        assert "is published without a claim" in caplog.text
        group(tasks.unchecked.s("p12"), tasks.unchecked.s("p13")).apply_async()
        assert sent(environment) == 3


@pytest.mark.redis_store("a proxy holds back the commands to Redis")
def test_late_claim_of_a_slow_store_does_not_refuse_the_next_try(server, start_proxy):
    server.flush()
    proxy = start_proxy(server)
    with loaded_app(APP, Urls(server.url(0), server.url(1), proxy.url(2))) as tasks:
        tasks.app.conf.dlock_timeout = 1.0
        environment = Claims(server, tasks)
        tasks.queued.delay("warm")
        proxy.set_mode("blackhole")
        with pytest.raises(StoreUnavailable):
            tasks.queued.delay("p40")
        with pytest.raises(StoreUnavailable):
            group(tasks.queued.s("p41"), tasks.queued.s("p42")).apply_async()
        # What was held back arrives now, and the claims are made after all.
        proxy.set_mode("pass")
        for n in ("p40", "p41", "p42"):
            eventually(
                lambda n=n: environment.locks.keys("*:tombstone:*") and environment.of(tasks.queued, n) is None, 10
            )
            accepted = tasks.queued.delay(n)
            assert environment.of(tasks.queued, n) == accepted.id
        assert sent(environment) == 4


def test_bad_arguments_raise_type_error_and_unnameable_ones_lock_key_error(environment):
    with pytest.raises(TypeError):
        environment.tasks.queued.delay()
    with pytest.raises(LockKeyError):
        environment.tasks.queued.delay(object())
    assert sent(environment) == 0


def test_an_eager_call_leaves_no_claim(environment):
    assert environment.tasks.queued.apply(("p14",)).get() == "p14"
    environment.tasks.app.conf.task_always_eager = True
    assert environment.tasks.queued.delay("p14").get() == "p14"
    assert group(environment.tasks.queued.s("p14")).apply_async().get() == ["p14"]
    assert environment.of(environment.tasks.queued, "p14") is None


def test_unique_queued_running_is_refused_while_a_lock_is_held(environment):
    """Under queued+running a Lock runs too; there is no result of it to return."""
    both = environment.tasks.both
    with both.lock_for("p15"), pytest.raises(LockHeld, match="a Lock is running"):
        both.delay("p15")
    assert both.delay("p15").id == environment.of(both, "p15")
    sent(environment)


def test_call_from_beat_claims_its_name(environment):
    beat = Scheduler(environment.tasks.app, lazy=True)
    entry = ScheduleEntry("e", "queued", schedule=schedule(60), args=("p16",), app=environment.tasks.app)
    first = beat.apply_async(entry, advance=False)
    assert beat.apply_async(entry, advance=False).id == first.id
    assert sent(environment) == 1


@pytest.fixture
def nightly(environment):
    """A class-based task with `unique`: without the `__header__` that Celery gives functions."""
    return environment.tasks.nightly


def test_class_based_task_with_unique_claims_when_published(environment, nightly):
    first = nightly.delay("p40")
    assert nightly.delay("p40").id == first.id
    assert nightly.apply_async(("p40",), dlock={"on_conflict": "retry"}).id == first.id
    chosen = environment.tasks.unclaimed_nightly.apply_async(("p41",), dlock={"unique": "queued"})
    assert environment.of(environment.tasks.unclaimed_nightly, "p41") == chosen.id
    assert sent(environment) == 2


def test_class_based_task_with_unique_claims_in_a_group(environment, nightly):
    group(nightly.s("p42"), nightly.s("p43")).apply_async()
    assert environment.of(nightly, "p42")
    assert environment.of(nightly, "p43")
    assert sent(environment) == 2


def test_class_based_task_with_unique_claims_from_beat(environment, nightly):
    beat = Scheduler(environment.tasks.app, lazy=True)
    entry = ScheduleEntry("e", "nightly", schedule=schedule(60), args=("p44",), app=environment.tasks.app)
    assert beat.apply_async(entry, advance=False).id == environment.of(nightly, "p44")
    assert sent(environment) == 1


def test_class_based_task_with_unique_refuses_bad_arguments(environment, nightly):
    with pytest.raises(LockKeyError, match="missing a required argument: 'n'"):
        nightly.delay()
    assert sent(environment) == 0


def test_chunks_claim_nothing(environment):
    environment.tasks.queued.chunks([("p17",), ("p17",)], 1).apply_async()
    assert environment.of(environment.tasks.queued, "p17") is None
    assert sent(environment) == 2


def counts(server, *names):
    with server.client() as client:
        stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names)


def reads(server):
    with server.client() as client:
        return client.info("stats")["total_reads_processed"]


@pytest.fixture
def apart(server, tmp_path):
    """The locks on a server of their own, so that what they cost can be counted."""
    with (
        Server(tmp_path / "locks") as locks,
        loaded_app(APP, Urls(server.url(0), server.url(1), locks.lock_url(0))) as tasks,
    ):
        tasks.queued.delay("warm")
        yield locks, tasks


@pytest.mark.invariant("claim-costs-one-round-trip")
@pytest.mark.redis_store("it counts the commands of Redis")
def test_a_publish_costs_one_round_trip_and_a_task_without_claims_none(apart):
    locks, tasks = apart
    before, own = reads(locks), reads(locks)
    own -= before
    before = reads(locks)
    tasks.plain.delay("r0")
    assert reads(locks) - before - own == 0
    before, scripts = reads(locks), counts(locks, "evalsha", "eval")
    tasks.queued.delay("r1")
    assert counts(locks, "evalsha", "eval") - scripts == 1
    assert reads(locks) - before - 2 * own <= 1 + own


@pytest.mark.invariant("claim-costs-one-round-trip")
@pytest.mark.redis_store("it counts the commands of Redis")
@pytest.mark.parametrize("size", [2, 200])
def test_a_group_claims_in_one_round_trip_whatever_its_size(apart, size):
    locks, tasks = apart
    scripts, before, own = counts(locks, "evalsha", "eval"), reads(locks), reads(locks)
    own -= before
    before = reads(locks)
    result = group(tasks.queued.s(f"g{size}-{n}") for n in range(size))
    result = group(list(result.tasks)).apply_async()
    # One write of any size may be read in parts of 16 kB.
    written = -(-size * 700 // 16384)
    assert reads(locks) - before - own <= written
    assert counts(locks, "evalsha", "eval") - scripts == size
    assert len(result) == size


@pytest.mark.invariant("claim-belongs-to-one-message")
@pytest.mark.long
@pytest.mark.parametrize(("processes", "each"), [(3, 300), pytest.param(8, 625, marks=pytest.mark.slow)])
def test_publishes_of_100_names_from_several_processes_are_100_messages(environment, server, processes, each):
    command = [sys.executable, "-m", "tests.support.environments.claiming"]
    environ = urls_of(server).environ() | {"PYTHONPATH": str(ROOT)}
    publishers = [
        subprocess.Popen(
            [*command, str(number * each), str(each), "100", "start"], env=environ, cwd=ROOT, stdout=subprocess.PIPE
        )
        for number in range(processes)
    ]
    environment.history.rpush("start", *["go"] * processes)
    accepted = [int(publisher.communicate(timeout=100)[0]) for publisher in publishers]
    assert sum(accepted) == 100
    assert sent(environment) == 100
