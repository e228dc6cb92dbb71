"""The limits of ``celery dlock web``: no client uses up its connections or its checks of passwords."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from select import select
from typing import Any

import httpx2
import pytest
import uvicorn
from celery import Celery
from passlib.apache import HtpasswdFile
from passlib.context import CryptContext
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from celery_dlock.web import dashboard
from celery_dlock.web.basic_auth import BasicAuth, PasswordFile
from celery_dlock.web.connections import OPTIONS, ConnectionLimits
from celery_dlock.web.peers import PEER, network_of, peer_of
from tests.contract.test_cli import module  # noqa: F401  # fixtures are found by being here
from tests.support.polling import eventually
from tests.support.processes import ROOT, free_port

ADA = ("ada", "s3cret")
#: Files that the dashboard may open, which is the default of macOS, and connections and guesses of an attacker.
FILES, CONNECTIONS, GUESSES = 256, 300, 100
HALF = b"GET /locks HTTP/1.1\r\nHost: localhost\r\n"
REQUEST = HALF + b"\r\n"


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A file with the user ada, whose hash takes as long as one of ``htpasswd -B -C 12``: a quarter of a second."""
    path = tmp_path / "users"
    made = HtpasswdFile(path, new=True, context=CryptContext(["bcrypt"], bcrypt__rounds=12))
    made.set_password(*ADA)
    made.save()
    return path


@contextmanager
def served(module: str, folder: Path, users: Path) -> Iterator[int]:  # noqa: F811
    """Run the dashboard with few files, and yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "celery", "-A", module, "dlock", "web", "--port", str(port), "--auth-file", users]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as server:
        try:
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
            eventually(lambda: is_served(port), 60)
            yield port
        finally:
            server.send_signal(signal.SIGINT)
            _, said = server.communicate(timeout=40)
    assert "Too many open files" not in said
    assert "Traceback" not in said


def ask(port: int, path: str, password: str = "", *, source: str = "127.0.0.1") -> HTTPConnection:
    """Send a request, and return the connection for its answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60, source_address=(source, 0))
    known = b64encode(f"ada:{password}".encode()).decode()
    connection.request("GET", path, headers={"Authorization": f"Basic {known}"} if password else {})
    return connection


def status(connection: HTTPConnection) -> int:
    """Return the status of the answer; 0 if the connection was closed instead."""
    try:
        return connection.getresponse().status
    except (ConnectionError, HTTPException):
        return 0
    finally:
        connection.close()


def is_served(port: int) -> bool:
    try:
        return status(ask(port, "/healthz")) == 200
    except ConnectionError:
        return False


@pytest.mark.invariant("dashboard-limits-its-clients")
@pytest.mark.long
def test_half_sent_requests_and_wrong_passwords_keep_no_user_out(
    module: str,  # noqa: F811
    tmp_path: Path,
    users: Path,
) -> None:
    with served(module, tmp_path, users) as port, ThreadPoolExecutor(50) as attackers, ExitStack() as stack:
        for half in attackers.map(socket.create_connection, [("127.0.0.1", port)] * CONNECTIONS):
            stack.enter_context(half)
            with suppress(ConnectionError):
                half.sendall(HALF)
        assert status(ask(port, "/locks", ADA[1])) == 200

        os.utime(users, (1, 1))  # read again, so that no password is remembered
        guesses = list(attackers.map(lambda number: ask(port, "/locks", f"wrong{number}"), range(GUESSES)))
        assert status(ask(port, "/locks", ADA[1], source="127.0.0.2")) == 200
        checked = [status(guess) for guess in guesses if select([guess.sock], [], [], 0)[0]].count(401)
        assert checked < 25  # of 100; a check takes a quarter of a second, and two run at once


@contextmanager
def limited(app: Any, **limits: Any) -> Iterator[tuple[ConnectionLimits, int]]:
    """Serve an app with other limits in a thread, as the dashboard's server does, and yield its limits and its port."""
    made = ConnectionLimits(app, **limits)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(made, log_config=None, **OPTIONS))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield made, listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


async def big(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body of a form, or with more than a connection buffers."""
    request = Request(scope, receive)
    body = await request.body() if request.method == "POST" else b"." * 8_000_000
    await Response(body)(scope, receive, send)


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    with ExitStack() as stack:

        def made(port: int, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0))
            stack.enter_context(connection)
            connection.sendall(sent)
            return connection

        yield made


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection, without reading what it sent before."""
    connection.settimeout(0)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.invariant("dashboard-limits-its-clients")
@pytest.mark.parametrize(
    "sent", [b"", b"G", HALF, POST, REQUEST + HALF, POST + b"x" * 100 + POST],
    ids=["nothing", "a-byte", "half-a-head", "no-body", "half-a-second-head", "no-second-body"],
)  # fmt: skip
def test_client_that_sends_a_byte_now_and_then_is_closed(connect: Callable[..., socket.socket], sent: bytes) -> None:
    with limited(big, request_timeout=1.0) as (_, port):
        slow = connect(port, sent)

        def dripped() -> bool:
            with suppress(ConnectionError, BlockingIOError):
                slow.send(b"x")
            return is_closed(slow)

        eventually(dripped, 30, every=0.1)


def test_form_that_does_not_come_to_its_end_is_not_logged(
    app: Celery, connect: Callable[..., socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    with limited(dashboard(app, access=lambda _: "act"), request_timeout=1.0) as (_, port):
        form = POST.replace(b"/ ", b"/do/release ", 1)[:-2] + b"Content-Type: application/x-www-form-urlencoded\r\n\r\n"
        late, gone = connect(port, form), connect(port, form)
        gone.close()
        eventually(lambda: is_closed(late), 30)
    assert caplog.messages == []


@pytest.mark.invariant("dashboard-limits-its-clients")
def test_client_that_does_not_read_its_answer_is_closed(connect: Callable[..., socket.socket]) -> None:
    """Also one that sent many requests at once, whose answers are more than all buffers hold."""
    with limited(big, request_timeout=0.2, answer_timeout=1.0) as (limits, port):
        for sent in (REQUEST, REQUEST * 20):
            connect(port, sent)
            eventually(lambda: len(limits._open) == 1, 10)
            eventually(lambda: not limits._open, 30)


def test_client_that_reads_slowly_gets_its_whole_answer(connect: Callable[..., socket.socket]) -> None:
    with limited(big, request_timeout=0.2) as (_, port):
        slow, got = connect(port, REQUEST), 0
        for _ in range(10):
            got += len(slow.recv(1000))
            time.sleep(0.1)
        while got < 8_000_000 and (part := slow.recv(1_000_000)):
            got += len(part)
        assert got > 8_000_000


def test_answer_that_takes_long_to_make_is_sent(connect: Callable[..., socket.socket]) -> None:
    async def long(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(2)
        await PlainTextResponse("ready")(scope, receive, send)

    with limited(long, request_timeout=0.2) as (_, port):
        assert connect(port, REQUEST).recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.invariant("dashboard-limits-its-clients")
def test_new_connection_takes_the_place_of_the_oldest_one_that_waits(connect: Callable[..., socket.socket]) -> None:
    """First of the address that has the most, so that an attacker closes its own."""
    with limited(PlainTextResponse("ready"), connections=4) as (limits, port):
        user = connect(port, HALF, "127.0.0.2")
        eventually(lambda: len(limits._open) == 1)
        attackers = []
        for number in range(6):
            attackers.append(connect(port, HALF))
            eventually(lambda: len(limits._open) == min(4, number + 2))  # noqa: B023  # called in this round
        eventually(lambda: [is_closed(one) for one in attackers] == [True] * 3 + [False] * 3)
        assert not is_closed(user)
        late = connect(port, REQUEST, "127.0.0.3")
        late.settimeout(30)
        assert late.recv(100).startswith(b"HTTP/1.1 200")


def test_connection_that_the_app_works_for_is_not_closed(connect: Callable[..., socket.socket]) -> None:
    go_on, working = threading.Event(), []

    async def long(scope: Scope, receive: Receive, send: Send) -> None:
        working.append(scope)
        await asyncio.to_thread(go_on.wait, 60)
        await PlainTextResponse("ready")(scope, receive, send)

    with limited(long, connections=2) as (_, port):
        try:
            users = [connect(port, REQUEST) for _ in range(2)]
            eventually(lambda: len(working) == 2)
            refused = connect(port, REQUEST)
            eventually(lambda: is_closed(refused))
        finally:
            go_on.set()
        assert [user.recv(100).startswith(b"HTTP/1.1 200") for user in users] == [True] * 2


def test_connection_that_asks_for_websocket_stays_limited(connect: Callable[..., socket.socket]) -> None:
    upgrade = HALF + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with limited(big, request_timeout=1.0) as (limits, port):
        connection = connect(port, upgrade)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: is_closed(connection), 30)
        assert not limits._open


def test_forwarded_address_does_not_name_the_peer(connect: Callable[..., socket.socket]) -> None:
    """A client writes it, if the proxy does not: every guess of a password would come from another address."""
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(peer_of(scope))
        await PlainTextResponse("")(scope, receive, send)

    with limited(app) as (_, port):
        connect(port, HALF + b"X-Forwarded-For: 192.0.2.1\r\n\r\n").recv(100)
    assert seen == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
    ],
)
def test_ipv6_address_counts_as_its_network(host: str, network: str) -> None:
    assert network_of(host) == network
    assert peer_of({"type": "http", "client": (host, 1)}) == network


@pytest.mark.invariant("dashboard-limits-its-clients")
def test_password_waits_for_few_checks_and_too_many_are_refused_at_once(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, checked = threading.Event(), []

    def slow(*given: Any) -> bool:
        checked.append(given[1])
        go_on.wait(60)
        return given[1] == ADA[1]

    monkeypatch.setattr(CryptContext, "verify", slow)
    app = BasicAuth(PlainTextResponse("in"), PasswordFile(users))

    async def ask_from(peer: str, password: str) -> int:
        async def with_peer(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": {PEER: peer}}, receive, send)

        transport = httpx2.ASGITransport(app=with_peer)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", auth=("ada", password)) as one:
            answer = await one.get("/locks")
        assert ("retry-after" in answer.headers) == (answer.status_code == 429)
        return int(answer.status_code)

    async def attack() -> dict[str, list[int]]:
        passwords = {"192.0.2.1": "wrong", "192.0.2.2": "wrong", "192.0.2.3": ADA[1], "": "wrong"}
        asked: dict[str, list[asyncio.Task[int]]] = {}
        for peer, password in passwords.items():
            several = 1 if password == ADA[1] else 100
            peers = [peer or f"198.51.100.{number}" for number in range(several)]
            asked[peer] = [asyncio.create_task(ask_from(one, password)) for one in peers]
            await asyncio.sleep(0)  # so that this address is the first to ask
        tasks = [task for those in asked.values() for task in those]
        await asyncio.to_thread(eventually, lambda: sum(task.done() for task in tasks) == len(tasks) - 32, 30)
        go_on.set()
        return {peer: sorted(await asyncio.gather(*those)) for peer, those in asked.items()}

    assert asyncio.run(attack()) == {
        "192.0.2.1": [401] * 8 + [429] * 92,
        "192.0.2.2": [401] * 8 + [429] * 92,
        "192.0.2.3": [200],
        "": [401] * 15 + [429] * 85,
    }
    assert checked.index(ADA[1]) <= 16
