"""A worker whose metrics page is flooded runs its calls, and answers a scrape afterwards."""

import resource
import socket
import urllib.request
from contextlib import ExitStack, suppress

import pytest

from tests.support.polling import eventually

pytest.importorskip("prometheus_client", reason="installed in the main lane only")

APP = "tests.support.apps.counting"
#: More than the files that the worker may open.
CONNECTIONS, FILES = 250, 160


@pytest.mark.slow
def test_worker_whose_metrics_port_is_flooded_runs_its_calls(start_worker, load_app):
    """Each connection sends a byte now and then, so that no single read takes long."""
    module = load_app(APP)
    # After four calls each, so that the main process needs new files for the next pool child.
    worker = start_worker(APP, "--max-tasks-per-child", "4")
    port = int(worker.wait_for_log(r"metrics are served at http://127.0.0.1:(\d+)/metrics")[1])
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    with ExitStack() as stack:
        connections = []
        for _ in range(CONNECTIONS):
            with suppress(TimeoutError):  # the worker accepts connections more slowly than they are made
                connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.05)))

        def drip():
            for connection in connections:
                with suppress(OSError):  # the worker closed it
                    connection.sendall(b"x")

        def ran():
            drip()
            return int(module.tally.hget("tally", "run free") or 0)

        for number in range(16):
            module.free.delay(number)
        eventually(lambda: ran() == 16, within=40, every=0.1)

        def is_served():
            drip()
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
                return b'celery_dlock_acquired_total{task="free"} 16.0' in page.read()
            return False

        eventually(is_served, within=40, every=0.2)
    assert "Too many open files" not in worker.log()
    assert "Traceback" not in worker.log()
