"""The port of the metrics of a worker: the command line counts first, then the environment, then the setting."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT, free_port

pytest.importorskip("prometheus_client", reason="installed in the main lane only")

APP = "tests.support.apps.counting"  # its setting is any free port


@pytest.mark.parametrize("option", [True, False])
def test_metrics_port_of_option_and_variable_counts_before_the_setting(start_worker, option):
    ports = [str(free_port()), str(free_port())]
    given = [f"--dlock-metrics-port={ports[0]}"] if option else []
    worker = start_worker(APP, *given, environ={"DLOCK_METRICS_PORT": ports[1]}, concurrency=1)
    served = worker.wait_for_log(r"metrics are (?:not )?served at (?:http://)?127.0.0.1:(\d+)")[1]
    assert served == ports[0 if option else 1]


def test_metrics_port_that_is_none_ends_the_worker():
    facts = {
        "DLOCK_TEST_BROKER_URL": "memory://",
        "DLOCK_TEST_RESULT_URL": "redis://localhost",
        "DLOCK_TEST_LOCK_URL": "redis://localhost",
        "DLOCK_METRICS_PORT": "metrics",
        "PYTHONPATH": str(ROOT),
        "C_FORCE_ROOT": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", APP, "worker", "-P", "solo"]
    done = subprocess.run(command, env=os.environ | facts, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == os.EX_CONFIG
    assert "the worker does not start: invalid --dlock-metrics-port='metrics': expected a port" in done.stderr


def test_celery_multi_gives_each_worker_its_own_metrics_port():
    ports = ["--dlock-metrics-port:reports=9808", "--dlock-metrics-port:mails=9809"]
    command = [sys.executable, "-m", "celery", "multi", "show", "reports", "mails", "-A", "shop", *ports]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"--dlock-metrics-port=(\d+) -n (\w+)@", shown)
    assert found == [("9808", "reports"), ("9809", "mails")]
