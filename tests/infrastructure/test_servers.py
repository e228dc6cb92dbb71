import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tests.conftest import OwnServer
from tests.support.polling import eventually
from tests.support.processes import ROOT, session_of
from tests.support.servers import Server


@pytest.mark.core
@pytest.mark.parametrize("_again", [1, 2])
def test_every_test_finds_the_shared_server_empty(client: redis.Redis, redis_url: str, _again: int) -> None:
    assert client.dbsize() == 0
    client.set("left", "behind")
    assert redis.Redis.from_url(redis_url).get("left") == b"behind"


def test_a_lane_can_name_its_server(server: Server) -> None:
    assert str(server.binary) == os.environ.get("DLOCK_TEST_SERVER", str(server.binary))


def test_data_survive_a_kill_only_with_persistence(own_server: OwnServer) -> None:
    kept, lost = own_server(persistent=True), own_server()
    for server in (kept, lost):
        with server.client() as client:
            client.set("x", "1")
        server.kill()
        server.start()
    with kept.client() as client:
        assert client.get("x") == "1"
    with lost.client() as client:
        assert client.get("x") is None


def test_a_restarted_server_keeps_its_port(own_server: OwnServer) -> None:
    server = own_server()
    before = server.url()
    server.restart()
    assert server.url() == before


def test_a_killed_server_refuses(own_server: OwnServer) -> None:
    server = own_server()
    pid = server.pid
    server.kill()
    assert not session_of(pid)
    with server.client() as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_a_paused_server_is_silent_and_comes_back(own_server: OwnServer) -> None:
    server = own_server()
    server.pause()
    with server.client(socket_timeout=0.1) as client, pytest.raises(redis.TimeoutError):
        client.ping()
    server.resume()
    with server.client() as client:
        assert client.ping()


def test_a_server_with_a_password(own_server: OwnServer) -> None:
    server = own_server(options=("--requirepass", "secret"), password="secret")
    with server.client() as client:
        assert client.ping()
    server.password = None
    with server.client() as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_a_server_that_cannot_start_is_an_error_with_its_log(own_server: OwnServer) -> None:
    with pytest.raises(AssertionError, match=r"(?s)does not start:.*no-such-option"):
        own_server(options=("--no-such-option", "1"))


def test_no_server_outlives_a_test_run_that_is_killed(tmp_path: Path) -> None:
    program = """
        import os, pathlib, sys, tests.support.servers
        server = tests.support.servers.Server(pathlib.Path(sys.argv[1])).start()
        print(server.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", "if True:" + program, str(tmp_path)]
    killed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    eventually(lambda: not session_of(int(killed.stdout)), message="the server still lives")


def test_eventually_tells_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match="the moon: still 0 after"):
        eventually(lambda: 0, within=0.05, message="the moon")
