"""The lock store is away, and there is no message to republish: a `Lock`, an eager call."""

import contextlib
import time
from typing import Any

import pytest
from celery import states

from celery_dlock import Lock, runtime
from celery_dlock.errors import ReplyTimeout, StoreUnavailable
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app

APP = "tests.support.apps.faults_store"


@pytest.fixture
def proxied(clean_server: Server, start_proxy: Any) -> Proxy:
    made: Proxy = start_proxy(clean_server)
    return made


@pytest.mark.invariant("dead-store-costs-one-timeout")
def test_a_lock_asks_every_time_because_who_called_it_has_nothing_else(
    proxied: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded_app(APP, Urls("memory://", "cache+memory://", proxied.url())) as tasks:
        tasks.app.conf.update(dlock_timeout=0.2)
        monkeypatch.setattr(runtime, "BREAKER_RESET", 60)
        proxied.set_mode("blackhole")
        for _ in range(2):
            with pytest.raises(ReplyTimeout):
                Lock("x", app=tasks.app).acquire()
        proxied.set_mode("pass")
        with Lock("x", app=tasks.app):
            pass


def test_each_call_to_a_silent_store_takes_one_timeout(proxied: Proxy) -> None:
    with loaded_app(APP, Urls("memory://", "cache+memory://", proxied.url())) as tasks:
        assert tasks.TIMEOUT == 1.0
        lock = Lock("x", app=tasks.app)
        assert lock.acquire()
        proxied.set_mode("blackhole")
        for call in (lock.holder, lock.release):
            began = time.monotonic()
            with contextlib.suppress(ReplyTimeout):
                call()
            assert 1.0 <= time.monotonic() - began < 1.9
        proxied.set_mode("pass")
        eventually(lambda: not lock.locked(), message="a stuck lock")


@pytest.mark.parametrize(
    ("name", "state"), [("retrying", states.FAILURE), ("failing", states.FAILURE), ("bypassing", states.SUCCESS)]
)
def test_eager_call_fails_or_runs_because_it_has_no_message_to_republish(
    proxied: Proxy, name: str, state: str, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    monkeypatch.setenv("DLOCK_TEST_RESULT_URL", redis_url)
    with loaded_app(APP, Urls("memory://", "cache+memory://", proxied.url())) as tasks:
        proxied.set_mode("refuse")
        result = getattr(tasks, name).apply(("row",))
        assert result.state == state
        assert isinstance(result.result, StoreUnavailable) == (state == states.FAILURE)
