import gc
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import OwnServer
from tests.support.polling import eventually
from tests.support.processes import HOST
from tests.support.proxy import Mode, Proxy
from tests.support.servers import Server

StartProxy = Callable[[Server], Proxy]


def through(proxy: Proxy, timeout: float = 5.0) -> redis.Redis:
    return redis.Redis.from_url(proxy.url(), decode_responses=True, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))


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
    with through(proxy, timeout=0.5) as slow:
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


def test_cut_reply_can_strike_one_of_so_many(clean_server: Server, start_proxy: StartProxy) -> None:
    proxy = start_proxy(clean_server)
    proxy.set_mode("cut_reply", every=3, containing=b"INCR")
    answers: list[object] = []
    with through(proxy) as client:
        for _ in range(6):
            try:
                answers.append(client.incr("n"))
            except redis.ConnectionError:
                answers.append("cut")
    assert answers == ["cut", 2, 3, "cut", 5, 6]


def test_a_delay_holds_each_answer_back_and_loses_none(
    client: redis.Redis, clean_server: Server, start_proxy: StartProxy
) -> None:
    proxy = start_proxy(clean_server)
    with through(proxy, timeout=0.5) as late:
        late.ping()
        proxy.set_delay(0.2, 0.2)
        began = time.monotonic()
        assert [late.incr("n"), late.incr("n")] == [1, 2]
        assert 0.4 <= time.monotonic() - began < 0.9
        proxy.set_delay(0.6, 0.6)
        with pytest.raises(redis.TimeoutError):
            late.incr("n")
        assert client.get("n") == "3"


def test_half_open_connection_gets_no_data_and_a_new_one_is_served(
    own_server: OwnServer, start_proxy: StartProxy
) -> None:
    """It does not even see that the server ended."""
    server = own_server()
    proxy = start_proxy(server)
    with through(proxy) as deaf, through(proxy) as new, server.client() as direct:
        deaf.ping()
        proxy.half_open()
        assert new.ping()
        for server_lives in (True, False):
            connection = deaf.connection_pool.get_connection()
            connection.send_command("INCR", "n")
            assert not connection.can_read(timeout=0.2)
            deaf.connection_pool.release(connection)
            if server_lives:
                assert direct.get("n") is None
                server.kill()


def test_a_client_of_a_dead_server_is_reset() -> None:
    proxy = Proxy(1)
    with proxy, through(proxy) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    assert eventually(lambda: not proxy._thread.is_alive())


@pytest.mark.parametrize("mode", ["pass", "refuse", "blackhole"])
def test_it_leaves_no_connection_open_whenever_it_ends(clean_server: Server, mode: Mode) -> None:
    """It ends while clients connect and hang up; what is left open warns when it is collected."""
    for forgets in (False, True) * 10:
        over = threading.Event()
        with Proxy(clean_server.port or 0) as proxy:
            clients = [threading.Thread(target=keep_connecting, args=(proxy.port, over)) for _ in range(3)]
            for client in clients:
                client.start()
            if forgets:
                proxy.half_open()
            proxy.set_mode(mode)
        over.set()
        for client in clients:
            client.join()
    gc.collect()


def keep_connecting(port: int, over: threading.Event) -> None:
    while not over.is_set():
        with suppress(OSError), socket.create_connection((HOST, port), timeout=1) as client:
            client.sendall(b"PING\r\n")
        time.sleep(0.001)
