"""The testing kit: what its helpers do to an app, and what they fail for."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_dlock import Lock, LockLost, StoreUnavailable, singleton_task
from celery_dlock.errors import DLockError
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.runtime import Runtime
from celery_dlock.store.model import AcquireRequest, Requester
from celery_dlock.testing import DLockKit, assert_excludes, assert_locked, assert_runs_once, assert_separate, run_beats
from tests.support.polling import eventually

pytestmark = pytest.mark.core


@pytest.fixture
def app() -> Celery:
    app = Celery("kit", broker="memory://", backend="cache+memory://", set_as_current=False)
    # A queue of its own: other tests leave odd messages in the usual queue of kombu's memory broker.
    app.conf.update(dlock_url="redis://127.0.0.1:1/0", worker_hijack_root_logger=False, task_default_queue="kit")
    return app


@pytest.fixture
def kit(app: Celery) -> Iterator[DLockKit]:
    with DLockKit(app) as made:
        yield made


def task_of(app: Celery, body: Any = None, **options: Any) -> Any:
    def run(number: int) -> int:
        return body() if body else number

    return singleton_task(app=app, name="kit.run", **options)(run)


def test_settings_and_store_of_the_app_are_restored(app: Celery) -> None:
    runtime = Runtime.of(app)
    before = runtime.settings.locations
    app.conf.dlock_enabled = False
    with DLockKit(app):
        assert runtime.settings.locations[0].shown == "memory://"
        assert (app.conf.task_always_eager, runtime.enabled) == (True, True)
    assert runtime.settings.locations == before
    assert (app.conf.task_always_eager, runtime.enabled, app.conf.dlock_url) == (False, False, "redis://127.0.0.1:1/0")


def test_lock_of_another_app_that_a_body_leaves_held_is_released_in_its_own_kit(app: Celery, kit: DLockKit) -> None:
    other = Celery("other", broker="memory://", set_as_current=False)
    other.conf.dlock_url = "redis://127.0.0.1:1/0"
    task = task_of(app, Lock("stock", app=other).acquire)
    with DLockKit(other) as its:
        assert task.delay(1).result is True  # at its end, each kit checks that no lock is held
        assert [event.kind for event in its.events] == ["acquired", "released"]
    assert [event.kind for event in kit.events] == ["acquired", "released"]


def test_two_kits_share_no_lock(app: Celery) -> None:
    task = task_of(app, once_per=60)
    for _ in range(2):
        with DLockKit(app):
            assert task.delay(1).state == "SUCCESS"


def test_lock_that_is_left_fails_the_test(app: Celery) -> None:
    with pytest.raises(AssertionError, match=r"stock:\w+ is held by a Lock"), DLockKit(app) as kit:
        kit._take(shared_name("stock"), "o.1", AcquireRequest(Requester.of(None, None, "n", 1)))


def test_held_call_is_skipped_and_any_other_runs(kit: DLockKit, app: Celery) -> None:
    task = task_of(app)
    with kit.held(task, 1):
        assert [task.delay(1).state, task.delay(2).state] == ["REVOKED", "SUCCESS"]
    assert task.delay(1).state == "SUCCESS"


def test_held_lock_is_refused_by_its_name(kit: DLockKit, app: Celery) -> None:
    with kit.held("stock"):
        assert not Lock("stock", app=app).acquire(blocking=False)


def test_wait_gives_up_after_its_time(kit: DLockKit, app: Celery) -> None:
    task = task_of(app, wait=0.05)
    with kit.held(task, 1):
        assert task.delay(1).state == "REVOKED"


def test_used_call_returns_the_earlier_result(kit: DLockKit, app: Celery) -> None:
    task = task_of(app, once_per=60, on_used="return")
    kit.used(task, 1, result=42)
    assert task.delay(1).result == 42


def test_used_needs_once_per(kit: DLockKit, app: Celery) -> None:
    with pytest.raises(DLockError, match="remembers no earlier run: expected once_per with"):
        kit.used(task_of(app), 1)


def test_crashed_call_is_told_to_the_next_run(kit: DLockKit, app: Celery) -> None:
    task = task_of(app, lambda: task.lease.after_crash, once_per=60, after_crash="run")
    kit.crashed(task, 1)
    assert task.delay(1).result is True


def test_lost_lease_is_found_by_ensure(kit: DLockKit, app: Celery) -> None:
    def body() -> None:
        kit.lose(task, 1)
        task.lease.ensure()

    task = task_of(app, body)
    assert isinstance(task.delay(1).result, LockLost)


def test_lease_ends_when_the_clocks_travel(kit: DLockKit, app: Celery) -> None:
    task = task_of(app, lambda: (kit.travel(61), task.lease.held)[1], ttl=60)
    assert task.delay(1).result is False


def test_store_that_is_down_fails_the_call_and_comes_back(kit: DLockKit, app: Celery) -> None:
    task = task_of(app)
    with kit.store_down("gone"):
        assert isinstance(task.delay(1).result, StoreUnavailable)
    assert task.delay(1).state == "SUCCESS"


def test_store_that_is_down_leaves_one_body_per_machine_to_local_tasks(kit: DLockKit, app: Celery) -> None:
    task = task_of(app, on_store_error="local", on_conflict="skip", key="all")
    with kit.store_down("gone"):
        assert task.delay(1).state == "SUCCESS"
        with kit.held(task, 1):
            assert task.delay(1).state == "REVOKED"
        assert task.delay(1).state == "SUCCESS"
    assert [event.kind for event in kit.events if event.local] == ["bypassed", "bypassed"]
    with kit.held(task, 1), kit.store_down():
        assert task.delay(1).state == "SUCCESS"  # that owner is on another machine


def test_lock_files_of_a_test_are_deleted(app: Celery) -> None:
    task = task_of(app, on_store_error="local")
    with DLockKit(app) as kit, kit.store_down():
        assert task.delay(1).state == "SUCCESS"
        directory = Runtime.of(app).lock_files.directory.path
        assert Path(directory).is_dir()
    assert not Path(directory).exists()


def test_waiting_calls_run_one_by_one(app: Celery) -> None:
    with DLockKit(app, eager=False) as kit:
        task = task_of(app, on_conflict="queue", key="all")
        with kit.held(task, 0):
            results = [task.delay(number) for number in (1, 2)]
            kit.run_all()
            assert [waiter.position for waiter in kit.waiting(task)] == [1, 2]
            assert len(kit.waiting(task, 0)) == 2
        assert kit.run_next()
        assert [result.state for result in results] == ["SUCCESS", "QUEUED"]
        kit.run_all()
        assert [result.get(timeout=1) for result in results] == [1, 2]


def test_burst_runs_its_newest_call_when_the_clock_travels(app: Celery) -> None:
    ran: list[tuple[str, int]] = []

    @singleton_task(app=app, name="kit.saves", key=["document"], on_conflict="queue", debounce=60)
    def save(document: str, version: int) -> int:
        ran.append((document, version))
        return version

    with DLockKit(app, eager=False) as kit:
        calls = [save.delay("a", version) for version in (1, 2, 3)]
        assert kit.run_all() == 3
        kit.travel(30)
        assert (kit.run_all(), ran, [waiter.task_id for waiter in kit.waiting(save)]) == (0, [], [calls[2].id])
        kit.travel(30)
        assert (kit.run_all(), ran) == (1, [("a", 3)])
        assert [call.state for call in calls] == ["REVOKED", "REVOKED", "SUCCESS"]


def test_held_takes_all_seats_so_that_the_next_call_is_a_conflict(kit: DLockKit, app: Celery) -> None:
    task = task_of(app, limit=3)
    with kit.held(task, 1):
        assert [task.delay(1).state, task.delay(2).state] == ["REVOKED", "SUCCESS"]
    assert task.delay(1).state == "SUCCESS"


def test_held_seats_leaves_the_others_to_the_calls_of_the_test(kit: DLockKit, app: Celery) -> None:
    task = task_of(app, lambda: task.lease.seat, limit=3)
    with kit.held_seats(2, task, 1):
        assert task.delay(1).get() == 2
        with kit.held(task, 1):
            assert task.delay(1).state == "REVOKED"
        assert task.delay(1).get() == 2
        with pytest.raises(DLockError, match="its lock is not free"), kit.held_seats(2, task, 1):
            pass
    with (
        pytest.raises(DLockError, match=r"cannot hold 4 seats of 'kit\.run': expected 1 to 3"),
        kit.held_seats(4, task, 1),
    ):
        pass


@pytest.mark.parametrize("number", ["the task", 1.5, True])
def test_held_seats_without_a_whole_number_says_what_it_expects(kit: DLockKit, app: Celery, number: Any) -> None:
    task = task_of(app, limit=2)
    number = task if number == "the task" else number
    expected = "invalid number of seats .*: expected a whole number, and after it the task"
    with pytest.raises(DLockError, match=expected), kit.held_seats(number, task, 1):
        pass


def test_waiting_calls_get_the_seats_that_become_free(app: Celery) -> None:
    with DLockKit(app, eager=False) as kit:
        task = task_of(app, on_conflict="queue", key="all", limit=2)
        with kit.held_seats(1, task, 0):
            with kit.held(task, 0):
                results = [task.delay(number) for number in (1, 2, 3)]
                kit.run_all()
                assert [waiter.task_id for waiter in kit.waiting(task)] == [result.id for result in results]
                assert len(kit.waiting(task, 0)) == 3
            kit.run_all()
            assert [result.get(timeout=1) for result in results] == [1, 2, 3]
        assert not kit.waiting(task)


def test_waiting_calls_get_all_seats_that_are_free_when_the_clock_travels(app: Celery) -> None:
    with DLockKit(app, eager=False) as kit:
        task = task_of(app, on_conflict="queue", key="all", limit=2, min_hold=60)
        results = [task.delay(number) for number in range(4)]
        kit.run_all()
        assert [result.state for result in results] == ["SUCCESS", "SUCCESS", "QUEUED", "QUEUED"]
        kit.travel(60)
        assert kit.run_all() == 2
        assert [result.get(timeout=1) for result in results] == [0, 1, 2, 3]


def test_newer_call_stops_the_running_one(app: Celery) -> None:
    newer: list[str] = []

    def body() -> None:
        newer.append(kit.replace(task, 1))
        task.lease.ensure()

    task = task_of(app, body, on_conflict="replace")
    with DLockKit(app, eager=False) as kit:
        result = task.delay(1)
        assert kit.run_all() == 1
        assert result.state == "REVOKED"
        assert f"replaced by {newer[0]}" in str(result.result)
        with pytest.raises(DLockError, match="none runs"):
            kit.replace(task, 1)
    assert [event.kind for event in kit.events] == ["acquired", "skipped", "released"]


@pytest.mark.usefixtures("logging_restored")
def test_newer_call_stops_the_body_in_a_worker_of_the_test(app: Celery) -> None:
    started = threading.Event()

    @singleton_task(app=app, name="kit.deploy", key=["shop"], on_conflict="replace")
    def deploy(shop: str, version: int) -> str:
        started.set()
        while version == 1:
            time.sleep(0.01)
        return f"{shop} {version}"

    worker = start_worker(app, pool="threads", concurrency=3, perform_ping_check=False, shutdown_timeout=20)
    with DLockKit(app, eager=False), worker:
        older = deploy.delay("books", 1)
        assert started.wait(20)
        assert deploy.delay("books", 2).get(timeout=20) == "books 2"
        eventually(lambda: older.state == "REVOKED")


def test_newest_of_the_waiting_calls_runs(app: Celery) -> None:
    with DLockKit(app, eager=False) as kit:
        task = task_of(app, on_conflict="replace", key="all")
        with kit.held(task, 0):
            results = [task.delay(number) for number in (1, 2, 3)]
            kit.run_all()
            assert [waiter.task_id for waiter in kit.waiting(task)] == [results[2].id]
        kit.run_all()
        assert [result.state for result in results] == ["REVOKED", "REVOKED", "SUCCESS"]


def test_eager_call_is_stopped_by_a_newer_one(kit: DLockKit, app: Celery) -> None:
    def body() -> None:
        kit.replace(task, 1)
        task.lease.ensure()

    task = task_of(app, body, on_conflict="replace")
    assert task.delay(1).state == "REVOKED"


def test_running_call_is_left_alone_after_an_hour(kit: DLockKit, app: Celery) -> None:
    def body() -> str:
        kit.travel(3601)
        kit.replace(task, 1)
        task.lease.ensure()
        return "done"

    task = task_of(app, body, on_conflict="replace", ttl=7200)
    assert task.delay(1).get() == "done"


def test_replace_needs_that_policy(kit: DLockKit, app: Celery) -> None:
    with pytest.raises(DLockError, match="expected on_conflict='replace'"):
        kit.replace(task_of(app), 1)


def test_lost_seat_is_found_by_ensure(kit: DLockKit, app: Celery) -> None:
    def body() -> None:
        kit.lose(task, 1)
        task.lease.ensure()

    task = task_of(app, body, limit=2)
    with kit.held_seats(1, task, 1):
        assert isinstance(task.delay(1).result, LockLost)


def test_seat_that_is_left_fails_the_test(app: Celery) -> None:
    name = task_of(app, limit=2).lock_spec.name_of((1,), {})
    request = AcquireRequest(Requester.of(None, None, "n", 1))
    with pytest.raises(AssertionError, match=r":\w+:1 is held by a Lock"), DLockKit(app) as kit:
        assert [kit._take(name, owner, request).seat for owner in ("o.1", "p.1")] == [0, 1]


@pytest.mark.usefixtures("kit")
def test_eager_call_is_not_debounced(app: Celery) -> None:
    assert task_of(app, on_conflict="queue", debounce=5).delay(1).get() == 1


def test_run_next_needs_published_calls(kit: DLockKit) -> None:
    with pytest.raises(DLockError, match="calls run eagerly"):
        kit.run_next()


def test_run_next_needs_the_memory_broker(app: Celery) -> None:
    app.conf.broker_url = "redis://127.0.0.1:1"
    with DLockKit(app, eager=False) as kit, pytest.raises(DLockError, match="the broker is 'redis', expected"):
        kit.run_next()


@pytest.mark.usefixtures("logging_restored")
def test_calls_run_in_a_worker_of_the_test(app: Celery) -> None:
    with DLockKit(app, eager=False) as kit:
        task = task_of(app, on_conflict="queue")
        with start_worker(app, pool="threads", perform_ping_check=False, shutdown_timeout=20):
            with kit.held(task, 1):
                result = task.delay(1)
                eventually(lambda: len(kit.waiting(task)) == 1)
            assert result.get(timeout=20) == 1
            eventually(lambda: not kit.waiting(task))


def test_events_tell_what_happened(kit: DLockKit, app: Celery) -> None:
    task_of(app).delay(1)
    assert [(event.kind, event.task) for event in kit.events] == [("acquired", "kit.run"), ("released", "kit.run")]


def test_assertions_on_names(app: Celery) -> None:
    task = task_of(app)
    assert_excludes(task.s(1), task.s(number=1))
    assert_separate(task.s(1), task.s(2))
    with pytest.raises(AssertionError, match="may run at the same time: their locks are"):
        assert_excludes(task.s(1), task.s(2))
    with pytest.raises(AssertionError, match="exclude each other: both have the lock"):
        assert_separate(task.s(1), task.s(1))


def test_calls_that_share_seats_do_not_exclude_each_other(app: Celery) -> None:
    task = task_of(app, limit=3)
    with pytest.raises(AssertionError, match="may run at the same time: 3 calls may hold"):
        assert_excludes(task.s(1), task.s(1))


def test_assert_runs_once_fails_without_once_per(kit: DLockKit, app: Celery) -> None:
    del kit
    assert_runs_once(task_of(app, once_per=60), (1,))
    with pytest.raises(AssertionError, match=r"kit\.other ran twice: expected once_per"):
        assert_runs_once(singleton_task(app=app, name="kit.other")(lambda_body))


def lambda_body() -> None: ...


def test_assert_locked_needs_a_lock(kit: DLockKit, app: Celery) -> None:
    del kit
    with pytest.raises(AssertionError, match="this code runs without a lock"):
        assert_locked()
    with Lock("stock", app=app):
        assert_locked()
    assert task_of(app, assert_locked).delay(1).state == "SUCCESS"


def test_beats_send_each_tick_and_it_runs_once(kit: DLockKit, app: Celery) -> None:
    task_of(app, once_per="tick")
    app.conf.beat_schedule = {"hourly": {"task": "kit.run", "schedule": 3600.0, "args": (1,)}}
    sent = run_beats(app, n=3, hours=5)
    assert [tick.runs for tick in sent] == [1] * 5
    assert [len(tick.states) for tick in sent] == [3] * 5
    del kit


def test_beats_need_the_kit(app: Celery) -> None:
    with pytest.raises(DLockError, match=r"expected run_beats\(\) within the fixture dlock"):
        run_beats(app)
