"""The receivers of the shop's sends: an SMTP server and the SMS gateway, which count by message id."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session

from example_project.demo.server import free_port
from example_project.sms_gateway import SmsGateway

# Seconds until a receiver answers: long enough for a copy of the send to arrive in between.
TAKES = 0.15

# The sends whose sender is killed after they arrive. The receiver answers late enough for that.
DOOMED = "doomed"


def takes(sent: str) -> float:
    return 3.0 if DOOMED in sent else TAKES


class Mailbox:
    """The handler of the SMTP server."""

    def __init__(self) -> None:
        self._received: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802  # aiosmtpd's
        message_id = str(message_from_bytes(envelope.original_content or b"")["Message-ID"])
        number = message_id.strip("<>").partition("@")[0]
        with self._lock:
            self._received[number] += 1
        await asyncio.sleep(takes(number))
        return "250 OK"

    def received(self) -> Counter[str]:
        with self._lock:
            return self._received.copy()


@contextmanager
def smtp_server() -> Iterator[tuple[str, Mailbox]]:
    mailbox = Mailbox()
    # Not port 0: the controller connects to the given port to check that the server is up.
    controller = Controller(mailbox, hostname="127.0.0.1", port=free_port())
    controller.start()
    try:
        yield f"127.0.0.1:{controller.port}", mailbox
    finally:
        controller.stop()


@contextmanager
def sms_gateway() -> Iterator[tuple[str, SmsGateway]]:
    with SmsGateway("127.0.0.1", 0, takes=takes) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{gateway.server_port}", gateway
        finally:
            gateway.shutdown()
            thread.join()
