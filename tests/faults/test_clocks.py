"""The clock of the store's host, or of a worker's, jumps by an hour while locks are held."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, Held, Renewal
from celery_dlock.store.redis.store import RedisStore
from tests.conftest import LoadApp, OwnServer, StartWorker
from tests.contract.helpers import NAME, ending_of, keys_of, request_of, take
from tests.support.polling import eventually
from tests.support.processes import ROOT
from tests.support.servers import Server
from tests.support.stores import name_in, store_at

HOUR = 3600
QUEUEING = "tests.support.apps.queueing"
WRONG_CLOCK = "import time\nright = time.time\ntime.time = lambda: right() + {ahead}\n"
LIBRARY = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


class SteppedServer:
    """A server whose wall clock the test sets, by libfaketime; its monotonic clock goes on."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "step"
        self._write(0)
        environ = {
            "LD_PRELOAD": LIBRARY,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self.server = Server(folder / "server", environ=environ)

    def step(self, seconds: int) -> None:
        """So far from the true time from now on."""
        self._write(seconds)
        with self.server.client() as client:
            # Its own idea of the time, by which keys end, is a little older than what TIME says.
            eventually(lambda: abs(client.info("server")["server_time_usec"] / 1e6 - time.time() - seconds) < 60)

    def _write(self, seconds: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._file)  # at once: half a file is another time


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[SteppedServer]:
    stepped = SteppedServer(tmp_path)
    with stepped.server:
        yield stepped


@pytest.fixture
def store(clock: SteppedServer) -> Iterator[RedisStore]:
    store = store_at(clock.server.url(), timeout=3.0)
    yield store
    store.close()


@pytest.fixture
def client(clock: SteppedServer) -> Iterator[redis.Redis]:
    with clock.server.client() as client:
        yield client


def seconds_of(client: redis.Redis) -> int:
    return int(client.time()[0])


@pytest.mark.invariant("store-clock-steps")
@pytest.mark.servers
@pytest.mark.parametrize("step", [-HOUR, HOUR])
def test_tokens_never_go_back(clock: SteppedServer, store: RedisStore, client: redis.Redis, step: int) -> None:
    tokens = []
    for number, offset in enumerate([0, step, 0, step]):
        before = seconds_of(client)
        clock.step(offset)
        eventually(lambda before=before, number=number: number == 0 or abs(seconds_of(client) - before) > HOUR - 60)
        tokens.append(take(store, f"o.{number}").token)
        store.release(NAME, f"o.{number}", ReleaseRequest())
    assert tokens == sorted(set(tokens))


@pytest.mark.invariant("store-clock-steps")
@pytest.mark.servers
def test_clock_that_goes_back_lets_a_dead_holders_lock_end_a_ttl_after_the_next_call(
    clock: SteppedServer, store: RedisStore, client: redis.Redis
) -> None:
    keys = keys_of()
    assert isinstance(store.acquire(name_in(keys), "dead.1", 1500, request_of()), Acquired)
    clock.step(-HOUR)
    assert client.pttl(keys.lock) > (HOUR - 10) * 1000, "the clock did not go back; the test tests nothing"
    began = time.monotonic()
    assert isinstance(store.acquire(name_in(keys), "next.1", 1500, request_of()), Held)
    eventually(lambda: isinstance(store.acquire(name_in(keys), "next.2", 1500, request_of()), Acquired), 5)
    assert 1.0 <= time.monotonic() - began <= 1.5 + 0.5


@pytest.mark.invariant("store-clock-steps")
@pytest.mark.servers
def test_a_renewal_gives_a_lock_its_ttl_again_after_the_clock_went_back(
    clock: SteppedServer, store: RedisStore, client: redis.Redis
) -> None:
    keys = keys_of()
    take(store, "o.1")
    clock.step(-HOUR)
    assert store.renew([Renewal(name_in(keys), "o.1", 30_000)]) == [True]
    assert 29_000 <= client.pttl(keys.lock) <= 30_000


@pytest.mark.invariant("store-clock-steps")
@pytest.mark.servers
def test_a_lock_kept_for_its_min_hold_lasts_no_longer_though_the_clock_went_back(
    clock: SteppedServer, store: RedisStore, client: redis.Redis
) -> None:
    keys = keys_of()
    take(store, "o.1", request_of(min_hold_ms=1500))
    clock.step(-HOUR)
    store.release(name_in(keys), "o.1", ending_of("x"))
    assert client.pttl(keys.lock) <= 1500


@pytest.mark.invariant("store-clock-steps")
@pytest.mark.servers
def test_clock_that_jumps_ahead_reports_the_loss_and_the_next_token_is_higher(
    clock: SteppedServer, store: RedisStore
) -> None:
    keys = keys_of()
    first = take(store, "first.1")
    clock.step(HOUR)
    assert store.renew([Renewal(name_in(keys), "first.1", 30_000)]) == [False]
    second = take(store, "second.1")
    assert second.token > first.token + HOUR * 1_000_000 - 60_000_000
    assert store.release(name_in(keys), "first.1", ReleaseRequest()).ours is False
    assert store.inspect(name_in(keys)) is not None


@pytest.mark.invariant("worker-clock-does-not-matter")
@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_the_wall_clock_of_a_worker_does_not_matter(
    own_server: OwnServer, start_worker: StartWorker, load_app: LoadApp, tmp_path: Path, ahead: int
) -> None:
    """Two workers an hour apart: every message runs, once, and none beside another.

    To a worker ahead of it the broker's unacknowledged messages look older than the visibility timeout, so kombu
    delivers them again while they run.
    """
    server = own_server()
    urls = {"broker": server.url(), "result": server.url(1), "lock": server.url(2)}
    start_worker(QUEUEING, **urls)
    # Not by libfaketime: under it, sleeping until a moment of the monotonic clock fails with EINVAL.
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK.format(ahead=ahead))
    start_worker(QUEUEING, **urls, environ={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    tasks = load_app(QUEUEING, **urls)
    results = [tasks.late.delay("n", text=str(number)) for number in range(40)]
    assert [result.get(timeout=30) for result in results] == ["n"] * 40
    with server.client(1) as client:
        history = [json.loads(text) for text in client.lrange("history", 0, -1)]
    bodies = [(note["what"], note["text"]) for note in history if note["what"] in ("in", "out")]
    assert sorted(text for what, text in bodies if what == "in") == sorted(map(str, range(40)))
    assert all(begun == ("in", text) for begun, (_, text) in zip(bodies[::2], bodies[1::2], strict=True))
    assert len({note["pid"] for note in history if note["what"] == "in"}) > 1, "only one worker ran any"
