"""A `Lock` outside a worker, behind a network that fails."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_dlock import Lock, LockLost, signals
from tests.support.environments.network import TIMEOUT, TO_STORE, TTL
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import Server


def plain_lock(url: str) -> Lock:
    """Of an app of its own, as in a process of its own."""
    app = Celery("plain", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url=url, dlock_timeout=TIMEOUT)
    return Lock("x", app=app, ttl=TTL)


@pytest.fixture
def told() -> Iterator[list[float]]:
    """Return the time when a lock was reported as lost."""
    times: list[float] = []

    def listen(**_: Any) -> None:
        times.append(time.monotonic())

    signals.lock_lost.connect(listen)
    yield times
    signals.lock_lost.disconnect(listen)


@pytest.fixture
def proxy(clean_server: Server, start_proxy: Callable[[Server], Proxy]) -> Proxy:
    return start_proxy(clean_server)


@pytest.mark.invariant("partitioned-lock-is-reported")
@pytest.mark.parametrize("name", TO_STORE)
def test_a_lock_outside_a_worker_is_kept_too_and_released(
    proxy: Proxy, clean_server: Server, told: list[float], name: str
) -> None:
    lock, seen = plain_lock(proxy.url()), plain_lock(clean_server.url())
    disturbance = TO_STORE[name]
    lock.acquire()
    assert lock.lease is not None
    token, began = lock.lease.token, time.monotonic()
    while (age := time.monotonic() - began) < disturbance.lasts:
        disturbance.strike(proxy, age)
        holder = seen.holder()
        assert holder is not None
        assert (holder.token, lock.lease.held) == (token, True), f"after {age:.1f} s"
        time.sleep(0.05)
    ended = time.monotonic()
    lock.release()
    eventually(lambda: not seen.locked())
    assert time.monotonic() - ended <= disturbance.freed_within
    assert told == []


@pytest.mark.invariant("partitioned-lock-is-reported")
def test_partitioned_lock_outside_a_worker_reports_the_loss_in_time(
    proxy: Proxy, clean_server: Server, told: list[float]
) -> None:
    """It learns of the loss before another one holds the lock. Its late release frees nothing."""
    lock, other = plain_lock(proxy.url()), plain_lock(clean_server.url())
    lock.acquire()
    assert lock.lease is not None
    proxy.set_mode("blackhole")
    assert other.acquire(timeout=TTL + 1.0)
    taken = time.monotonic()
    assert len(told) == 1
    assert told[0] < taken
    with pytest.raises(LockLost):
        lock.lease.ensure()
    proxy.set_mode("pass")
    with pytest.raises(LockLost):
        lock.release()
    holder = other.holder()
    assert holder is not None
    assert other.lease is not None
    assert holder.token == other.lease.token
    other.release()
