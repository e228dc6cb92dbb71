import threading
from collections.abc import Callable

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.proxy import Proxy
from tests.servers import Server
from tests.waiting import eventually

StartProxy = Callable[[Server], Proxy]


def through(proxy: Proxy) -> redis.Redis:
    return redis.Redis.from_url(proxy.url(), decode_responses=True, socket_timeout=0.5, retry=Retry(NoBackoff(), 0))


@pytest.mark.core
def test_it_forwards_both_ways_also_what_is_larger_than_a_chunk(clean_server: Server, start_proxy: StartProxy) -> None:
    large = "x" * 1_000_000
    with through(start_proxy(clean_server)) as client:
        client.set("a", large)
        assert client.get("a") == large


def test_refuse_resets_the_living_and_refuses_the_new(clean_server: Server, start_proxy: StartProxy) -> None:
    proxy = start_proxy(clean_server)
    with through(proxy) as living, through(proxy) as new:
        living.ping()
        proxy.set_mode("refuse")
        for client in (living, new):
            with pytest.raises(redis.ConnectionError):
                client.ping()
        proxy.set_mode("pass")
        assert new.ping()


def test_blackhole_holds_requests_back_until_it_ends(
    client: redis.Redis, clean_server: Server, start_proxy: StartProxy
) -> None:
    proxy = start_proxy(clean_server)
    with through(proxy) as slow:
        slow.ping()
        proxy.set_mode("blackhole")
        with pytest.raises(redis.TimeoutError):
            slow.incr("n")
        assert client.get("n") is None
        held = threading.Thread(target=slow.ping)
        held.start()
        proxy.set_mode("pass")
        held.join(5)
        assert slow.incr("n")


def test_cut_reply_lets_the_server_do_what_the_client_never_hears(
    client: redis.Redis, clean_server: Server, start_proxy: StartProxy
) -> None:
    proxy = start_proxy(clean_server)
    with through(proxy) as cut:
        cut.ping()
        proxy.set_mode("cut_reply", times=1, containing=b"INCR")
        assert cut.ping()
        with pytest.raises(redis.ConnectionError):
            cut.incr("n")
        assert client.get("n") == "1"
        assert proxy.mode == "pass"
        assert cut.incr("n") == 2


def test_a_client_of_a_dead_server_is_reset() -> None:
    proxy = Proxy(1)
    with proxy, through(proxy) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    assert eventually(lambda: not proxy._thread.is_alive())
