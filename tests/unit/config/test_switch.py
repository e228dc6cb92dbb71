"""Calls without a lock need no lock store: ``dlock={"enabled": False}``, and the setting ``dlock_enabled=False``."""

import logging
from typing import Any

import pytest
from celery import Celery, chain, group

from celery_dlock import InvalidLockOptions, Lock, SingletonTask, singleton_task
from celery_dlock.errors import NoLockStore
from celery_dlock.worker import SingletonStep

pytestmark = pytest.mark.core

UNREACHABLE = "redis://127.0.0.1:1"


def made(**conf: Any) -> Celery:
    app = Celery("tested", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(conf)
    return app


def task_of(app: Celery, **options: Any) -> Any:
    @singleton_task(app=app, name="tested.work", bind=True, **options)
    def work(self: SingletonTask, n: Any = 1) -> Any:
        return [n, self.lease.held, self.lease.token]

    return work


@pytest.fixture
def off() -> Celery:
    """An app without a store whose tests need no locks."""
    return made(dlock_enabled=False)


def test_eager_call_without_a_lock_needs_no_store() -> None:
    work = task_of(made())
    assert work.apply((1,), dlock={"enabled": False}).get() == [1, False, None]
    failed = work.apply((1,))
    assert isinstance(failed.result, NoLockStore)
    assert "dlock_enabled=False" in str(failed.result)


def test_call_without_a_lock_needs_no_lock_name() -> None:
    nameless = {1: object()}
    assert task_of(made()).apply((nameless,), dlock={"enabled": False}).get()[0] is nameless


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_conflict": "queue"},
        {"unique": "queued+running", "on_conflict": "retry"},
        {"once_per": 60},
        {"once_per": "tick"},
        {"on_lost": "abort", "keep_on_retry": True, "min_hold": 9},
    ],
)
def test_disabled_app_runs_tasks_of_every_policy_without_a_store(off: Celery, options: Any) -> None:
    off.conf.task_always_eager = True
    work = task_of(off, **options)
    for _ in range(2):
        assert work.delay(3).get() == [3, False, None]
        assert work.apply((3,), dlock={"ttl": 9}).get() == [3, False, None]
    assert group(work.s(1), work.s(2)).delay().get() == [[1, False, None], [2, False, None]]
    assert chain(work.s(1), work.si(2)).delay().get() == [2, False, None]


def test_disabled_app_publishes_unique_calls_without_a_claim(off: Celery) -> None:
    work = task_of(off, unique="queued", on_duplicate="raise", on_conflict="retry")
    assert work.delay(1).id != work.delay(1).id


def test_disabled_app_answers_questions_without_a_store(off: Celery) -> None:
    work = task_of(off, once_per=60, on_conflict="queue")
    assert work.used(1) is None
    assert not work.forget(1)
    assert not work.resolve(1, sent=True)
    assert work.waiting(1).count == 0


def test_disabled_app_grants_every_lock_object_at_once(off: Celery) -> None:
    lock, other = Lock("name", app=off), Lock("name", app=off)
    with lock, other, task_of(off).lock_for(1):
        assert lock.lease is not None
        lock.lease.ensure()
        assert other.acquire(blocking=False)
        other.release()
    assert not lock.locked()
    assert lock.holder() is None


def test_disabled_app_warns_once_in_a_process(off: Celery, caplog: pytest.LogCaptureFixture) -> None:
    work = task_of(off)
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        for _ in range(3):
            work.apply().get()
    assert [record.getMessage() for record in caplog.records] == [
        "dlock_enabled is False: tasks run and are published without locks"
    ]


def test_setting_may_change_between_two_calls() -> None:
    app = made(dlock_url=UNREACHABLE, dlock_timeout=0.05)
    work = task_of(app, on_store_error="fail")
    for enabled, state in ((True, "FAILURE"), (False, "SUCCESS"), (True, "FAILURE")):
        app.conf.dlock_enabled = enabled
        assert work.apply().state == state


def test_setting_in_a_namespace_is_read() -> None:
    app = Celery("tested", broker="memory://", set_as_current=False)
    app.config_from_object({"CELERY_DLOCK_ENABLED": False}, namespace="CELERY")
    assert task_of(app).apply().get() == [1, False, None]


def test_setting_that_is_no_bool_is_refused() -> None:
    work = task_of(made(dlock_enabled="no"))
    with pytest.raises(InvalidLockOptions, match="invalid dlock_enabled='no': expected True, or False"):
        work.apply(throw=True)


def embedded(app: Celery) -> Any:
    return type("Embedded", (), {"app": app})()


def test_embedded_worker_without_a_store_starts_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    app = made()
    task_of(app)
    worker = embedded(app)
    with caplog.at_level(logging.WARNING, "celery_dlock"):
        assert not SingletonStep(worker).include_if(worker)
    assert "except for calls without a lock: dlock_url is not set" in caplog.text


def test_worker_of_a_disabled_app_starts_nothing_of_ours(off: Celery) -> None:
    task_of(off)
    worker = embedded(off)
    assert not SingletonStep(worker).include_if(worker)


def test_app_without_any_url_is_told_to_be_imported() -> None:
    app = Celery("empty", set_as_current=False)
    app.conf.broker_url = app.conf.result_backend = None
    with pytest.raises(NoLockStore, match=r"'empty' has no .* pass app= to the decorator or the Lock"):
        Lock("name", app=app).acquire()
