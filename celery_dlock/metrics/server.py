"""Serves the metrics of a worker by HTTP, in a thread of its main process."""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from ..utils.background import begin_thread
from ..utils.fork_guard import no_fork
from ..utils.log import logger
from .worker import import_prometheus

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["serve"]

#: Seconds that a client may take to send its whole request, and to take each part of the answer.
_REQUEST_TIMEOUT = 5.0
#: Connections at a time. Each one costs the worker a thread and a file.
_CONNECTIONS: Final = 8


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Two workers on one port would otherwise both bind it, and each scrape would show one of them.
    allow_reuse_port = False

    def __init__(self, *given: Any) -> None:
        #: The open connections, and when each must have sent its request: infinite once it has.
        self._deadlines: dict[socket.socket, float] = {}
        # Without it, the deadline could shut down a file that was closed and opened again for something else.
        self._lock = Lock()
        super().__init__(*given)

    def verify_request(self, request: Any, _client_address: Any) -> bool:
        """Return whether one more connection may be open. If not, the caller closes it."""
        with self._lock:
            if len(self._deadlines) >= _CONNECTIONS:
                return False
            self._deadlines[request] = time.monotonic() + _REQUEST_TIMEOUT
            return True

    def received(self, request: socket.socket) -> None:
        """Note that a request is complete. Its answer may take longer than a request."""
        with self._lock:
            self._deadlines[request] = float("inf")

    def service_actions(self) -> None:
        """Shut down the connections whose request is late. ``serve_forever`` calls this at least twice a second."""
        now = time.monotonic()
        with self._lock:
            for connection, deadline in self._deadlines.items():
                if deadline < now:
                    with suppress(OSError):  # the client has closed it
                        connection.shutdown(socket.SHUT_RDWR)

    def close_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().close_request(request)

    def close_in_child(self) -> None:
        """Close the files that a fork inherited. The worker's port and connections would stay open after its end."""
        for inherited in (self.socket, *self._deadlines):
            with suppress(OSError):
                # Not `close`, which waits for the files that a handler made of the socket.
                os.close(inherited.detach())

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Log an error. The base class writes a traceback to stderr, also of a client that hung up."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):  # at a low level, or clients that hang up would fill the log
            logger.debug("a client of the metrics server hung up: %s", error)
        else:
            logger.error("the metrics server could not answer a request", exc_info=error)


def serve(address: tuple[str, int], collectors: list[Any]) -> int | None:
    """Serve ``/metrics`` from now on, in a thread.

    A port that cannot be opened is logged, and the worker runs without metrics: often a second worker of this host
    has it.

    Args:
        address: The host name or address to bind, and the port; 0 for any free port.
        collectors: The collectors to export.

    Returns:
        The port; None if it cannot be opened.

    Raises:
        InvalidLockOptions: ``prometheus_client`` is not installed.
    """
    prometheus = import_prometheus()
    registry = prometheus.CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    try:
        server = _Server(address, _handler(prometheus, registry))
    except OSError as error:
        # Without the traceback, which does not tell more.
        logger.error("metrics are not served at %s:%d: %s", *address, error)  # noqa: TRY400
        return None
    _close_in_children(server)
    begin_thread("metrics")(server.serve_forever)
    host, port = server.server_address[:2]
    logger.info("metrics are served at http://%s:%d/metrics", host, port)
    return int(port)


def _close_in_children(server: _Server) -> None:
    ref = weakref.ref(server)

    def close() -> None:
        if (inherited := ref()) is not None:
            inherited.close_in_child()

    os.register_at_fork(after_in_child=close)


def _handler(prometheus: Any, registry: Any) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT  # of a write: the server ends a read that takes longer
        server: _Server
        server_version = "celery-dlock"
        sys_version = ""

        def do_GET(self) -> None:
            self.server.received(self.connection)
            if urlsplit(self.path).path not in ("/", "/metrics"):
                self.send_error(404)
                return
            encode, content_type = prometheus.exposition.choose_encoder(self.headers.get("Accept") or "")
            with no_fork():  # a child must not inherit the locks of the registry
                body = encode(registry)
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing: a scrape each few seconds would fill the log."""

    return Handler
