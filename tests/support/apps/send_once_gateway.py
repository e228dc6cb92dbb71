"""An SMS gateway over HTTP that counts what reaches it: POST an SMS, GET the counts."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Gateway(ThreadingHTTPServer):
    """Listens on a free port of this machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        #: How often each SMS came, and how many different idempotency keys it had.
        self.sent: Counter[str] = Counter()
        self.keys: dict[str, set[str]] = {}

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        sms = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        # Counted before the answer: an SMS is on its way although the client may never hear so.
        self.server.sent[sms["id"]] += 1
        self.server.keys.setdefault(sms["id"], set()).add(sms["key"])
        self._answer({})

    def do_GET(self) -> None:
        self._answer(self.server.sent)

    def _answer(self, content: dict[str, int]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def running_gateway() -> Iterator[Gateway]:
    with Gateway() as gateway:
        thread = threading.Thread(target=gateway.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield gateway
        gateway.shutdown()
        thread.join(10)
