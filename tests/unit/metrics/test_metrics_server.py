"""The server of the metrics page under clients that behave badly."""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from celery_dlock.metrics import server
from tests.support.polling import eventually

prometheus_client = pytest.importorskip("prometheus_client", reason="installed in the main lane only")

HEAD = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"


class Slow:
    """A collector whose answer waits for an event."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.asked = 0

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        self.asked += 1
        self.go_on.wait(60)
        yield prometheus_client.core.GaugeMetricFamily("answer", "The answer.", 42)


@pytest.fixture
def collector() -> Slow:
    return Slow()


@pytest.fixture
def port(collector: Slow) -> int:
    bound = server.serve(("127.0.0.1", 0), [collector])
    assert bound is not None
    return bound


@pytest.fixture
def connect(port: int) -> Iterator[Any]:
    """Return a function that connects to the server."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def scraped(port: int) -> bool:
    try:
        return "answer 42.0" in page(port)
    except OSError:  # refused
        return False


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection. It has sent nothing before."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def threads_of_requests() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_ninth_connection_is_closed_at_once(port: int, connect: Any) -> None:
    """A thread and a file for each connection would use up those of the worker."""
    first = [connect() for _ in range(8)]
    eventually(lambda: threads_of_requests() == 8, within=20)
    ninth = connect()
    eventually(lambda: is_closed(ninth), within=20)
    assert [is_closed(connection) for connection in first] == [False] * 8
    first[0].close()
    eventually(lambda: scraped(port), within=20)


def test_request_that_drips_is_cut_at_the_deadline(port: int, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit for each read never ends a client that sends a byte now and then."""
    monkeypatch.setattr(server, "_REQUEST_TIMEOUT", 1.0)
    dripping = [connect() for _ in range(8)]
    for connection in dripping:
        connection.sendall(HEAD)

    def all_are_cut() -> bool:
        for connection in dripping:
            connection.setblocking(True)
            try:
                connection.sendall(b"x")
            except ConnectionError:
                continue
        return all(is_closed(connection) for connection in dripping)

    eventually(all_are_cut, within=20, every=0.1)
    assert scraped(port)


def test_deadline_does_not_cut_a_page_that_takes_long(
    port: int, collector: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gauges of a large store take longer than a request."""
    monkeypatch.setattr(server, "_REQUEST_TIMEOUT", 0.2)
    collector.go_on.clear()
    threading.Timer(1.5, collector.go_on.set).start()
    began = time.monotonic()
    assert "answer 42.0" in page(port)
    assert time.monotonic() - began > 1


def test_client_that_hangs_up_writes_no_traceback(
    connect: Any, collector: Slow, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_dlock")
    collector.go_on.clear()
    connection = connect()
    connection.sendall(HEAD + b"\r\n")
    eventually(lambda: collector.asked == 1, within=20)
    # With a reset, so that the server's first write fails.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    collector.go_on.set()
    eventually(lambda: threads_of_requests() == 0, within=20)
    assert capfd.readouterr().err == ""
    assert len(caplog.records) <= 1
    assert "Traceback" not in caplog.text


def sockets() -> set[int]:
    """Return the inodes of the sockets that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing itself
            status = descriptor.stat()
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return found


def test_child_does_not_keep_a_connection_open(connect: Any) -> None:
    """A pool child would keep it until its own end, and its client would wait."""
    before = sockets()
    connection = connect()
    eventually(lambda: threads_of_requests() == 1, within=20)
    (accepted,) = sockets() - before - {os.fstat(connection.fileno()).st_ino}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, as a worker's main process does
        pid = os.fork()
    if pid == 0:
        os._exit(accepted in sockets())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not is_closed(connection)  # the parent goes on
