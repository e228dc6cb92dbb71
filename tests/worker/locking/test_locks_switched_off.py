"""A worker whose calls take no lock needs no lock store, and nothing that one could be at."""

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

from celery_dlock import singleton_task
from celery_dlock.errors import NoLockStore

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("logging_restored")]


@pytest.fixture
def app():
    app = Celery("tested", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(
        worker_log_color=False, worker_hijack_root_logger=False, broker_transport_options={"polling_interval": 0.05}
    )
    return app


def running(app):
    return start_worker(app, pool="threads", perform_ping_check=False, shutdown_timeout=20)


def held_of(app, **options):
    @singleton_task(app=app, name="tested.held", bind=True, **options)
    def held(self, n):
        return bool(n and self.lease.held)

    return held


def test_embedded_worker_without_a_store_runs_calls_without_a_lock(app):
    held = held_of(app, track_started=True)
    with running(app):
        assert held.apply_async((1,), dlock={"enabled": False}).get(timeout=20) is False
        with pytest.raises(NoLockStore):
            held.delay(1).get(timeout=20)


def test_worker_of_a_disabled_app_runs_every_call_without_a_lock(app):
    app.conf.dlock_enabled = False
    held = held_of(app, unique="queued+running", on_conflict="queue", once_per=3600)
    with running(app):
        results = [held.delay(1), held.delay(1)]
        assert [result.get(timeout=20) for result in results] == [False, False]
