"""Serves the metrics of a worker by HTTP, in a thread of its main process."""

from __future__ import annotations

import os
import socketserver
import weakref
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..utils.background import begin_thread
from ..utils.fork_guard import no_fork
from ..utils.log import logger
from .worker import import_prometheus

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["serve"]

#: Seconds that a client may take to send its request.
_REQUEST_TIMEOUT = 10.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Two workers on one port would otherwise both bind it, and each scrape would show one of them.
    allow_reuse_port = False


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


def _close_in_children(server: socketserver.TCPServer) -> None:
    """Close the server's socket in every child: it would keep the port after the worker's end."""
    ref = weakref.ref(server)

    def close() -> None:
        if (inherited := ref()) is not None:
            inherited.socket.close()

    os.register_at_fork(after_in_child=close)


def _handler(prometheus: Any, registry: Any) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT
        server_version = "celery-dlock"
        sys_version = ""

        def do_GET(self) -> None:
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
