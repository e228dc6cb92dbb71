"""`Lock` in whole processes: kept, forked, killed, crowded; its server restarted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock import Lock
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.store.redis.keys import LockKeys
from tests.contract.conftest import MakeApp
from tests.support.processes import ROOT

KEYS = LockKeys.of("dlock", shared_name("x"))
Program = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def program(redis_url: str) -> Iterator[Program]:
    """Starts a program of tests/support/apps/locks.py."""
    with_pipes = []

    def start(name: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.support.apps.locks", name, redis_url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
        with_pipes.append(process)
        return process

    yield start
    for process in with_pipes:
        # Also what it forked: a child that hangs keeps the pipe open, and the test would wait for its end.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# The watchdog in a plain process


@pytest.mark.invariant("lease-deadline-precedes-request")
@pytest.mark.core
def test_watchdog_renews_for_three_ttls_and_never_expects_a_later_deadline(app: Celery, client: redis.Redis) -> None:
    """The deadline of the lease is never later than that of the store."""
    with Lock("x", app=app, ttl=2) as lock:
        assert lock.lease
        end = time.monotonic() + 6.2
        while time.monotonic() < end:
            read, remaining = time.monotonic(), lock.lease.remaining()
            in_store = client.pttl(KEYS.lock) / 1000
            assert 0.1 < remaining <= in_store + (time.monotonic() - read) + 0.001
            assert in_store <= 2
            time.sleep(0.02)
        assert lock.lease.token == int(client.hget(KEYS.lock, "token") or 0)


@pytest.mark.core
def test_extended_lease_is_not_shortened_by_the_watchdog_nor_by_ensure(app: Celery, client: redis.Redis) -> None:
    with Lock("x", app=app, ttl=2) as lock:
        assert lock.lease
        lock.lease.extend(60)
        lock.lease.ensure()
        time.sleep(1.4)
        assert lock.lease.remaining() > 50
        assert client.pttl(KEYS.lock) > 50_000


def test_watchdog_renews_200_locks_over_one_connection(
    program: Program,
) -> None:
    """It ends when it tracks no lease."""
    output, _ = program("crowd").communicate(timeout=60)
    assert output.splitlines() == [
        "watchdogs 1",
        "connections 2",
        "still held 200",
        "watchdogs left 0",
        "kept again True",
    ]


@pytest.mark.core
@pytest.mark.parametrize("way", ["fork", "fork_in_c"])
def test_after_a_fork_the_child_is_another_owner_and_cannot_free_the_parents_lock(program: Program, way: str) -> None:
    """However the fork was made: Python sees no fork in C, so nothing may depend on a notice of it."""
    output, _ = program(way).communicate(timeout=60)
    assert output.splitlines() == [
        "acquire what the parent took next False",
        "lease in child None",
        "release in child: NotHeld",
        "leaving in child: NotHeld",
        "acquire in child False",
        "kept in child True",
        "parent still holds True",
        "free afterwards True",
    ]


@pytest.mark.core
def test_a_lock_of_a_killed_process_is_free_after_its_ttl(app: Celery, program: Program) -> None:
    process = program("hold")
    assert process.stdout
    token = int(process.stdout.readline().removeprefix("held "))
    lock = Lock("x", app=app)
    # Renewed while it lives ...
    assert not lock.acquire(timeout=3.3)
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    # ... and free within a ttl of its death.
    assert lock.acquire(timeout=6)
    assert time.monotonic() - killed < 3.9
    assert lock.lease
    assert lock.lease.token
    assert lock.lease.token > token
    lock.release()


@pytest.mark.core
def test_eight_threads_that_count_under_the_lock_lose_nothing(
    program: Program,
) -> None:
    output, _ = program("count").communicate(timeout=60)
    assert output == "total 200\n"


@pytest.mark.core
def test_threads_that_use_an_app_first_and_at_once_share_one_lock_client(
    program: Program,
) -> None:
    """Else one of them could not release what it holds, and the watchdog would renew it for ever."""
    output, _ = program("first").communicate(timeout=60)
    assert output == "failed 0\n"


def test_a_restart_of_a_persistent_server_shows_no_error(own_server: Callable[..., Any], make_app: MakeApp) -> None:
    """Its scripts and the connections are gone, the lock is not."""
    server = own_server(persistent=True)
    lock = Lock("x", app=make_app(server.url()))
    with lock:
        assert lock.lease
        for step in (lock.lease.ensure, partial(lock.lease.extend, 40), lock.holder, lock.__enter__):
            server.restart()
            step()
        assert lock.lease.hold_count == 2
        server.restart()
        lock.release()
        server.restart()
    assert not lock.locked()
    server.restart()
    with lock:
        assert lock.locked()
