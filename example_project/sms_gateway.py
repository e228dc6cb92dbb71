"""A small SMS gateway over HTTP that counts its deliveries: POST an SMS, GET the counts.

It recognises a repeated `Idempotency-Key`, as many gateways do: it answers and does not deliver again.

python -m example_project.sms_gateway 127.0.0.1:8080
"""

import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class SmsGateway(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, takes: Callable[[str], float] = lambda _: 0.0) -> None:
        super().__init__((host, port), _Handler)
        self.takes = takes
        self._delivered: Counter[str] = Counter()
        self._recognised: Counter[str] = Counter()
        self._keys: set[str] = set()
        self._lock = threading.Lock()

    def receive(self, sms_id: str, key: str) -> bool:
        """Deliver an SMS; return False if its key was delivered before."""
        with self._lock:
            if key in self._keys:
                self._recognised[sms_id] += 1
                return False
            if key:
                self._keys.add(key)
            self._delivered[sms_id] += 1
            return True

    def delivered(self) -> Counter[str]:
        with self._lock:
            return self._delivered.copy()

    def recognised(self) -> Counter[str]:
        """Return how often each SMS was sent again with a known key, and not delivered."""
        with self._lock:
            return self._recognised.copy()


class _Handler(BaseHTTPRequestHandler):
    server: SmsGateway

    def do_POST(self) -> None:
        sms = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        # Count before the answer: the SMS is delivered even if the client never gets the answer.
        if self.server.receive(str(sms["id"]), self.headers.get("Idempotency-Key", "")):
            time.sleep(self.server.takes(str(sms["id"])))
        with contextlib.suppress(ConnectionError):  # the sender has died
            self._answer(202, {"accepted": sms["id"]})

    def do_GET(self) -> None:
        self._answer(200, dict(self.server.delivered()))

    def _answer(self, status: int, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: phone numbers do not belong in a log, and the demo uses the terminal."""


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    with SmsGateway(host, int(port)) as gateway:
        print(f"SMS gateway ready on {sys.argv[1]}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            gateway.serve_forever()


if __name__ == "__main__":
    main()
