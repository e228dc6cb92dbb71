"""The collector of a worker's counters, and the server that shows them."""

from __future__ import annotations

import builtins
import logging
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from celery import Celery

from celery_dlock.config.settings import Settings
from celery_dlock.counters.catalog import METRICS
from celery_dlock.errors import InvalidLockOptions
from celery_dlock.metrics import WorkerCollector
from celery_dlock.metrics.server import serve
from celery_dlock.runtime import Runtime
from celery_dlock.worker.delivery_registry import DeliveryRegistry

prometheus_client = pytest.importorskip("prometheus_client", reason="installed in the main lane only")


def app_with(**conf: Any) -> Celery:
    app = Celery("metrics", broker="redis://h", set_as_current=False)
    app.conf.update(conf)
    return app


def page_of(app: Celery) -> str:
    registry = prometheus_client.CollectorRegistry()
    registry.register(WorkerCollector(app))
    Runtime.of(app).counts.start(["pay"])
    return str(prometheus_client.generate_latest(registry).decode())


def test_collector_exports_the_names_and_labels_of_the_catalog() -> None:
    app = app_with()
    page = page_of(app)
    shown = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert shown == {metric.exported for metric in METRICS if metric.source == "worker"}
    assert 'celery_dlock_conflicts_total{outcome="skipped",task="pay"} 0.0' in page
    assert 'celery_dlock_lost_total{cause="forgotten",task="other"} 0.0' in page


def test_collector_collects_nothing_outside_of_a_worker() -> None:
    assert list(WorkerCollector(app_with()).collect()) == []


def test_collector_is_refused_after_the_pool_has_started() -> None:
    app = app_with()
    DeliveryRegistry.of(app)
    with pytest.raises(InvalidLockOptions, match=r"^this worker counts nothing, because its pool has started"):
        WorkerCollector(app)


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidLockOptions, match=r"pip install 'celery-dlock\[prometheus\]'$"):
        WorkerCollector(app_with())


def test_server_answers_metrics_and_nothing_else() -> None:
    app = app_with()
    Runtime.of(app).counts.start(["pay"])
    port = serve(("127.0.0.1", 0), [WorkerCollector(app)])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        assert page.headers["Content-Type"].startswith("text/plain")
        assert b"celery_dlock_build_info{" in page.read()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/tasks", timeout=10)
    assert refused.value.code == 404


def test_port_in_use_is_logged_and_does_not_stop_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.ERROR, "celery_dlock"):
            assert serve(("127.0.0.1", port), []) is None
    assert caplog.messages == [f"metrics are not served at 127.0.0.1:{port}: [Errno 98] Address already in use"]


@pytest.mark.parametrize(
    ("given", "address"),
    [
        (9808, ("127.0.0.1", 9808)),
        ("9808", ("127.0.0.1", 9808)),
        ("0.0.0.0:9808", ("0.0.0.0", 9808)),
        ("[::1]:0", ("::1", 0)),
        (None, None),
    ],
)
def test_port_alone_is_bound_to_the_loopback_interface(given: Any, address: tuple[str, int] | None) -> None:
    assert Settings.of(app_with(dlock_metrics_port=given)).metrics_port == address


@pytest.mark.parametrize("given", [True, "metrics", "host:", -1, 65_536, 1.5])
def test_port_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(InvalidLockOptions, match=r"^invalid dlock_metrics_port=.*: expected a port"):
        Settings.of(app_with(dlock_metrics_port=given))
