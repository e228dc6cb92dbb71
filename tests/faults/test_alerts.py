"""A real Prometheus loads the alert rules, and scrapes a worker and the gauges of a store that goes away."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_dlock.metrics import StoreCollector
from celery_dlock.metrics.server import serve
from tests.support.polling import eventually
from tests.support.processes import ROOT, free_port
from tests.support.proxy import Proxy
from tests.support.servers import LOCK_PASSWORD, OPERATOR_USER, Server
from tests.support.workers import Urls, loaded_app, running_worker

pytest.importorskip("prometheus_client", reason="installed in the main lane only")

APP = "tests.support.apps.faults_store"


@contextmanager
def prometheus(folder: Path, *targets: int) -> Iterator[str]:
    """Run a Prometheus that scrapes these ports once a second, and yield its address."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "celery_dlock/monitoring/alerts.yml")],
        "scrape_configs": [
            {"job_name": "dlock", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in targets]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            yield f"http://{address}/api/v1"
        finally:
            server.terminate()


def ask(url: str) -> Any:
    with suppress(OSError), urllib.request.urlopen(url, timeout=10) as page:
        return json.load(page)["data"]
    return None


def alerts(api: str) -> dict[str, str]:
    """Return the states of the alerts that are pending or fire, by name."""
    found = ask(f"{api}/alerts") or {"alerts": []}
    return {alert["labels"]["alertname"]: alert["state"] for alert in found["alerts"]}


def value(api: str, query: str) -> float | None:
    found = ask(f"{api}/query?query={query}")
    return float(found["result"][0]["value"][1]) if found and found["result"] else None


@pytest.mark.servers
def test_store_that_goes_away_and_bodies_without_a_lock_raise_alerts(tmp_path: Path) -> None:
    port = free_port()
    with Server(tmp_path / "broker") as broker, Server(tmp_path / "locks") as locks:
        assert locks.port is not None
        with Proxy(locks.port) as proxy:
            lock = proxy.url().replace("//", f"//{OPERATOR_USER}:{LOCK_PASSWORD}@")
            urls = Urls(broker.url(), broker.url(1), lock)
            environ = {"DLOCK_METRICS_PORT": str(port)}
            with loaded_app(APP, urls) as tasks, running_worker(APP, folder=tmp_path, urls=urls, environ=environ):
                gauges = serve(("127.0.0.1", 0), [StoreCollector(tasks.app)])
                assert gauges is not None
                with prometheus(tmp_path, port, gauges) as api:
                    eventually(lambda: value(api, "sum(celery_dlock_bypassed_total)") == 0, 30)
                    eventually(lambda: value(api, "min(celery_dlock_store_up)") == 1, 30)
                    eventually(lambda: alerts(api) == {}, 30)
                    proxy.set_mode("refuse")
                    tasks.bypassing.delay("row").get(timeout=30)
                    eventually(lambda: alerts(api).get("CeleryDlockBodyWithoutLock") == "firing", 30)
                    # The gauges are kept for 10 s, and the alert waits for a minute.
                    eventually(lambda: alerts(api).get("CeleryDlockStoreDown") in ("pending", "firing"), 40)
                    assert "CeleryDlockStoreErrors" in alerts(api)
