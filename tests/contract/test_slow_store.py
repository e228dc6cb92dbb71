"""A store that answers late, but answers, keeps what it was given."""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest
from celery import Celery

from celery_dlock import Lock
from tests.support.proxy import CHUNK, Proxy, _Link
from tests.support.servers import Server

TTL = 5
LATE = 0.6


class LateProxy(Proxy):
    """Pass each request on `late` s after it came: a far region, or a server that runs another program's script."""

    def __init__(self, target_port: int, late: float) -> None:
        super().__init__(target_port)
        self.late = late

    async def _forward_requests(self, link: _Link) -> None:
        while chunk := await self._loop.sock_recv(link.near, CHUNK):
            await asyncio.sleep(self.late)
            await self._loop.sock_sendall(link.far, chunk)


@pytest.fixture
def late_url(server: Server, redis_url: str) -> Iterator[str]:
    assert redis_url
    assert server.port is not None
    with LateProxy(server.port, LATE) as proxy:
        yield proxy.url()


def test_a_lock_outlives_two_ttls_though_each_answer_takes_0_6_s(
    late_url: str, make_app: Callable[..., Celery], redis_url: str
) -> None:
    lock = Lock("late", app=make_app(late_url), ttl=TTL)
    seen = Lock("late", app=make_app(redis_url))
    assert lock.acquire(timeout=0)
    assert lock.lease is not None
    token, start = lock.lease.token, time.monotonic()
    while time.monotonic() < start + 2 * TTL:
        assert lock.lease.held, f"lost after {time.monotonic() - start:.1f} s"
        holder = seen.holder()
        assert holder is not None
        assert holder.token == token
        time.sleep(0.1)
    lock.release()
    assert not seen.locked()
