"""A small SMS gateway over HTTP that counts what it was told to send: POST an SMS, GET the counts.

python -m example_project.sms_gateway 127.0.0.1:8080
"""

import contextlib
import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class SmsGateway(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, takes: float = 0.0) -> None:
        super().__init__((host, port), _Handler)
        self.takes = takes
        self._received: Counter[str] = Counter()
        self._lock = threading.Lock()

    def receive(self, sms_id: str) -> None:
        with self._lock:
            self._received[sms_id] += 1

    def received(self) -> Counter[str]:
        with self._lock:
            return self._received.copy()


class _Handler(BaseHTTPRequestHandler):
    server: SmsGateway

    def do_POST(self) -> None:
        sms = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        # Counted before the answer: an SMS is on its way although the client may never hear so.
        self.server.receive(str(sms["id"]))
        time.sleep(self.server.takes)
        self._answer(202, {"accepted": sms["id"]})

    def do_GET(self) -> None:
        self._answer(200, dict(self.server.received()))

    def _answer(self, status: int, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: phone numbers do not belong in a log, and the demo has the terminal."""


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    with SmsGateway(host, int(port)) as gateway:
        print(f"SMS gateway ready on {sys.argv[1]}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            gateway.serve_forever()


if __name__ == "__main__":
    main()
