"""The gauges of the lock store, as Prometheus gets them."""

from typing import Any

import pytest
from celery import Celery

from celery_dlock import Lock
from celery_dlock.counters.catalog import METRICS
from celery_dlock.metrics import StoreCollector

prometheus_client = pytest.importorskip("prometheus_client", reason="installed in the main lane only")


def app_at(url: str) -> Celery:
    app = Celery("gauges", broker=url, set_as_current=False)
    app.conf.dlock_url = url
    return app


def page_of(collector: Any) -> str:
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    return str(prometheus_client.generate_latest(registry).decode())


def test_store_collector_exports_every_gauge_of_the_catalog(redis_url: str) -> None:
    app = app_at(redis_url)
    with Lock("gauged", app=app):
        page = page_of(StoreCollector(app))
    shown = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert shown == {metric.exported for metric in METRICS if metric.kind == "gauge"}
    assert 'celery_dlock_locks{task="other"} 1.0' in page


def test_store_collector_keeps_a_reading_for_ten_seconds(redis_url: str) -> None:
    app = app_at(redis_url)
    collector = StoreCollector(app)
    first = page_of(collector)
    with Lock("gauged", app=app):
        assert page_of(collector) == first


def test_store_that_does_not_answer_shows_as_down() -> None:
    page = page_of(StoreCollector(app_at("redis://127.0.0.1:1/0")))
    assert 'celery_dlock_store_up{server="redis://127.0.0.1:1/0"} 0.0' in page
    assert "celery_dlock_locks" not in page
