"""Warnings of a worker at its start about a store that cannot keep locks, in one line each; the cost of a hung one."""

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from typing_extensions import Self

from celery_dlock import Lock
from celery_dlock.errors import StoreRefused, StoreUnavailable
from celery_dlock.runtime import Runtime
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.redis.sentinel import SentinelEndpoint
from celery_dlock.worker import store_check as inspection
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from celery_dlock.worker.queue_sweeper import QueueSweeper
from celery_dlock.worker.store_check import StoreCheck
from tests.conftest import OwnServer
from tests.support.processes import HOST, free_port
from tests.support.servers import Server
from tests.support.topologies import MASTER_NAME, RedlockSet, SentinelSet, TlsServer
from tests.unit.fakes import FakeClock

Start = Callable[..., str]


def app_at(url: Any, **conf: Any) -> Celery:
    app = Celery("here", broker="memory://", set_as_current=False)
    app.conf.update({"dlock_url": url, "dlock_timeout": 0.3, **conf})
    return app


@pytest.fixture
def start(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return the warnings of the inspection at a worker's start."""
    monkeypatch.setattr(inspection, "AGAIN", 0.0)
    caplog.set_level(logging.INFO, "celery_dlock")

    def inspected(app: Celery) -> str:
        tries = iter([True])
        StoreCheck(Runtime.of(app), lambda: next(tries, False), parks=False).loop.run()
        (line,) = [
            record.getMessage()
            for record in caplog.records
            if record.module == "store_check" and record.levelno > logging.INFO
        ]
        assert "\n" not in line
        assert "s3cret" not in line
        return line

    return inspected


def test_a_replica_given_as_the_primary(own_server: OwnServer, start: Start) -> None:
    server = own_server(options=["--replicaof", f"{HOST} 1"])
    assert start(app_at(server.lock_url())) == (
        f"lock store redis://{HOST}:{server.port}/0 is not ready, retrying every 0 s: it is a replica, "
        "and takes no writes until it is promoted; or dlock_url has to name the primary; "
        f"server reply: READONLY it is a replica of {HOST}:1"
    )


def test_a_node_of_a_cluster_given_as_a_server(own_server: OwnServer, start: Start) -> None:
    server = own_server(options=["--cluster-enabled", "yes"])
    assert "it is a node of a Redis Cluster: let dlock_url begin with redis+cluster://" in start(app_at(server.url()))


def test_a_server_given_as_a_cluster(clean_server: Server, start: Start) -> None:
    line = start(app_at(f"redis+cluster://{HOST}:{clean_server.port}"))
    assert "it is a single server and no node of a Redis Cluster: let dlock_url begin with redis://" in line


def test_a_server_given_as_a_sentinel(clean_server: Server, start: Start) -> None:
    place = f"{HOST}:{clean_server.port}"
    assert start(app_at(f"sentinel://:s3cret@{place}?master_name=m")) == (
        f"lock store sentinel://{place} refuses every lock; action required: the sentinel at {place}: it is a server "
        "and no sentinel: let dlock_url begin with redis:// or rediss://, or name a sentinel's port (26379)"
    )


def test_a_sentinel_given_as_a_server(sentinel_set: SentinelSet, start: Start) -> None:
    app = app_at(f"redis://:s3cret@{HOST}:{sentinel_set.sentinels[0].port}".replace(":s3cret@", ""))
    assert "it is a sentinel and keeps no locks: let dlock_url begin with sentinel://, and set" in start(app)
    with pytest.raises(StoreRefused, match="it is a sentinel and keeps no locks"):
        Lock("x", app=app).acquire(blocking=False)


def test_a_number_of_a_database_that_is_not_there(clean_server: Server, start: Start) -> None:
    line = start(app_at(f"redis://{HOST}:{clean_server.port}/99"))
    assert "it has fewer databases: correct the number at the end of dlock_url, or raise its `databases`" in line


def test_durability_that_no_lock_will_have(clean_server: Server, start: Start) -> None:
    app = app_at(clean_server.lock_url())
    app.conf.dlock_durability = {"replicas": 1, "timeout": 0.1}
    line = start(app)
    assert line.startswith("dlock_durability requires 1 replicas but a lock server has 0 connected; locks on it fail")


# Redlock


@pytest.fixture
def two(own_server: OwnServer) -> tuple[Server, Server]:
    return own_server(), own_server()


@pytest.mark.invariant("one-server-has-one-vote")
def test_one_server_under_two_names(two: tuple[Server, Server], start: Start, caplog: Any) -> None:
    one, other = two
    urls = [f"redis://{HOST}:{one.port}", f"redis://localhost:{one.port}", other.url()]
    app = app_at(urls, dlock_quarantine=0)
    wrong = f"{urls[0]} and {urls[1]} are the same server"
    assert start(app).startswith(f"invalid dlock_url for Redlock: {wrong}")
    assert [record.levelname for record in caplog.records if record.module == "store_check"] == ["ERROR"]
    # With the other one alive and dead; nothing is left behind.
    for number in range(10):
        with pytest.raises(StoreRefused, match=re.escape(wrong)):
            Lock(f"{number}", app=app).acquire(blocking=False)
        if number == 5:
            other.kill()
    with one.client() as client:
        assert client.keys("*lock*:lock:*") == []


def test_server_that_leaves_later_and_server_that_returns_are_logged(
    redlock_set: RedlockSet, own_server: OwnServer, watched: Callable[..., list[str]]
) -> None:
    node = own_server()
    urls = [*redlock_set.urls()[:2], node.url()]
    away, back = watched(app_at(urls), node.kill, node.start)
    assert away.startswith(
        f"lock server is unreachable, locks need a majority of the others: {node.url()}: did not answer: "
    )
    assert back == f"lock server is reachable again: {node.url()}"


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return the warnings about a store that changes between the looks of the inspection."""
    monkeypatch.setattr(inspection, "WATCH", 0.0)
    caplog.set_level(logging.INFO, "celery_dlock")

    def said(app: Celery, *happens: Callable[[], object]) -> list[str]:
        looks = iter([lambda: None, *happens])

        def goes_on() -> bool:
            happen = next(looks, None)
            if happen is not None:
                happen()
            return happen is not None

        StoreCheck(Runtime.of(app), goes_on, parks=False).loop.run()
        return [record.getMessage() for record in caplog.records if record.module == "store_check"]

    return said


def test_single_server_that_refuses_is_logged_once(
    redlock_set: RedlockSet, own_server: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    node = own_server()
    with node.client() as client:
        client.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-hset"])
        app = app_at([*redlock_set.urls()[:2], node.url()], dlock_quarantine=0)
        for name in ("x", "y", "z"):
            with Lock(name, app=app):
                pass
    told = [record.getMessage() for record in caplog.records if record.module == "member"]
    (line,) = [text for text in told if "a server of the lock store refuses" in text]
    assert line.startswith(
        f"a server of the lock store refuses: {node.url()}: the lock store refused: a right is missing"
    )


# Sentinel


def test_failover_is_logged_once_per_process(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    caplog.set_level(logging.INFO, "celery_dlock")
    clock = FakeClock()
    place = StoreLocation.of("sentinel://s?master_name=m")
    doors = [SentinelEndpoint(place, timeout=1, clock=clock) for _ in range(2)]
    for port in (1, 1, 2, 2, 1):
        monkeypatch.setattr(SentinelEndpoint, "_asked", lambda self, port=port: (HOST, port))
        clock.now += 5
        assert [door.address() for door in doors] == [(HOST, port)] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"lock store: the sentinels name {HOST}:2 now (was {HOST}:1)",
        f"lock store: the sentinels name {HOST}:1 now (was {HOST}:2)",
    ]


# Who looks after queues


@pytest.mark.parametrize("parks", [False, True])
def test_only_a_worker_with_queues_says_that_they_are_not_looked_after(
    parks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    looks = iter([True, True])
    runtime = Runtime.of(app_at(f"redis://{HOST}:{free_port()}"))
    QueueSweeper(DeliveryRegistry(runtime), lambda call: call(), lambda: next(looks, False), parks=parks).loop.run()
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in told] == ["queues are not swept, retrying every 0.1 s"] * parks


# TLS

NO_TLS = (
    "(over TLS, which rediss:// or an option asks for: perhaps the server does not speak TLS: "
    "use its TLS port, or switch TLS off)"
)


def test_tls_asked_of_a_server_without(clean_server: Server, start: Start) -> None:
    port = clean_server.port
    line = start(app_at(f"rediss://:s3cret@{HOST}:{port}/0"))
    assert line.startswith(f"lock store rediss://{HOST}:{port}/0 is unreachable, retrying every 0 s: ")
    assert line.endswith(NO_TLS)


@pytest.mark.parametrize(("url", "hinted"), [("rediss://{}:{}/0", True), ("redis://:s3cret@{}:{}/0", False)])
def test_timeout_over_tls_hints_that_the_server_may_have_no_tls(url: str, hinted: bool) -> None:
    with socket.create_server((HOST, 0)) as silent:
        lock = Lock("x", app=app_at(url.format(*silent.getsockname()), dlock_timeout=0.2))
        with pytest.raises(StoreUnavailable) as refused:
            lock.locked()
    assert ("perhaps the server does not speak TLS" in str(refused.value)) == hinted


def test_tls_asked_of_a_cluster_without(clean_server: Server, start: Start) -> None:
    assert NO_TLS in start(app_at(f"rediss+cluster://:s3cret@{HOST}:{clean_server.port}"))


def test_tls_asked_for_beside_the_url_of_a_server_without(clean_server: Server, start: Start) -> None:
    assert NO_TLS in start(app_at(clean_server.url(), dlock_transport_options={"ssl": True}))


def test_tls_asked_for_of_a_primary_without(sentinel_set: SentinelSet, start: Start) -> None:
    more = {"master_name": MASTER_NAME, "ssl": True}
    assert NO_TLS in start(app_at(sentinel_set.url(), dlock_transport_options=more))


def test_a_server_that_is_not_there(start: Start) -> None:
    place = f"redis://{HOST}:{free_port()}/0"
    line = start(app_at(place.replace("//", "//:s3cret@")))
    assert re.fullmatch(
        rf"lock store {place} is unreachable, retrying .*: .*Connection refused. \(check dlock_url\)", line
    )


# TLS, on the distribution's server: the wheels' has none


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with TlsServer(tmp_path_factory.mktemp("tls")) as made:
        yield made


@pytest.mark.servers
class TestTls:
    def test_no_tls_asked_of_a_server_with_tls_only(self, secure: TlsServer, start: Start) -> None:
        line = start(app_at(secure.plain_url()))
        assert line.startswith(f"lock store redis://{HOST}:{secure.port}/0 is unreachable, retrying every 0 s: ")

    def test_another_authority(self, secure: TlsServer, start: Start, tmp_path: Path) -> None:
        with TlsServer(tmp_path / "other") as other:
            line = start(app_at(secure.url().replace(str(secure.authority), str(other.authority))))
        assert "its certificate is not trusted: let ssl_ca_certs name the CA that signed it" in line

    def test_a_file_that_is_not_there(self, secure: TlsServer, start: Start) -> None:
        with pytest.raises(ValueError, match=r"ssl_ca_certs='/nowhere' is no file"):
            start(app_at(secure.url().replace(str(secure.authority), "/nowhere")))

    def test_no_certificate_where_one_is_wanted(self, start: Start, tmp_path: Path) -> None:
        with TlsServer(tmp_path / "mutual", mutual=True) as mutual:
            line = start(app_at(mutual.url().partition("&ssl_certfile")[0]))
        # With "perhaps" if the server closed the connection before its alert was read.
        assert "it requires a client certificate: set ssl_certfile and ssl_keyfile" in line


# What does not answer


@pytest.fixture
def hung() -> Iterator[Callable[[], "Hung"]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Hung())


class Hung:
    """As a server whose process stands still: the kernel takes connections, and no process reads."""

    def __init__(self) -> None:
        self.port = free_port()
        self._listener = socket.create_server((HOST, self.port), backlog=50)
        self._listener.setblocking(False)
        self._kept = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()
        self._listener.close()

    def tries(self) -> int:
        count = 0
        while True:
            try:
                self._kept.enter_context(self._listener.accept()[0])
            except BlockingIOError:
                return count
            count += 1


@pytest.mark.invariant("locks-use-celerys-connection", "hanging-servers-cost-one-timeout")
@pytest.mark.parametrize(
    ("form", "count"),
    [
        ("redis://:pw@{0}/1", 1),
        ("rediss://{0}", 1),
        ("sentinel://{0};sentinel://{1};sentinel://{2}?master_name=m", 3),
        ("redis+cluster://{0},{1},{2}", 3),
    ],
)
def test_a_store_that_hangs_costs_its_timeout_and_one_try_of_each_server(
    hung: Callable[[], Hung], monkeypatch: pytest.MonkeyPatch, form: str, count: int
) -> None:
    """redis-py's own would be ten tries of 5 s each."""
    servers = [hung() for _ in range(count)]
    url = form.format(*(f"{HOST}:{server.port}" for server in servers))
    app = app_at(url, dlock_timeout=2.0)
    monkeypatch.setattr(Runtime.of(app).watchdog, "wake", lambda: None)  # it would go on trying, behind the call
    lock = Lock("x", app=app)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        lock.acquire(blocking=False)
    assert time.monotonic() - began < 2 * 2.0
    # A Cluster's nodes tell of one another, so not all of them have to be asked.
    tries = [server.tries() for server in servers]
    assert (max(tries), sum(tries) in (count, count - 1)) == (1, True)
