"""The dashboard while the store does not answer: probes are answered in time, and pages hold few threads."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from celery import Celery

from celery_dlock.control import Health, LockControl
from celery_dlock.web import dashboard
from celery_dlock.web.page_threads import AT_ONCE
from tests.contract.web_helpers import SITE, client_of
from tests.support.polling import eventually
from tests.support.servers import Server

TIMEOUT = 0.5


@pytest.fixture
def silent(own_server: Callable[[], Server]) -> Iterator[Server]:
    """A server that accepts connections and answers nothing, until it is resumed."""
    server = own_server()
    server.pause()
    yield server
    server.resume()


@pytest.fixture
def app(silent: Server, make_app: Callable[..., Celery]) -> Celery:
    return make_app(silent.url(), dlock_timeout=TIMEOUT)


def ask(app: Any, *paths: str) -> list[httpx2.Response]:
    """Return the answers to requests that are sent at the same time."""

    async def ask_all() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=SITE, timeout=60) as client:
            return await asyncio.gather(*(client.get(path) for path in paths))

    return asyncio.run(ask_all())


def test_probes_of_a_silent_store_share_one_attempt_and_do_not_wait_for_its_end(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt repeats its commands, so it takes several timeouts."""
    began, go_on, health = [], threading.Event(), LockControl.health

    def endless(self: LockControl) -> Health:
        began.append(1)
        go_on.wait(60)
        return health(self)

    monkeypatch.setattr(LockControl, "health", endless)
    site = dashboard(app)
    try:
        start = time.monotonic()
        assert [answer.status_code for answer in ask(site, *["/healthz"] * 50)] == [503] * 50
        assert time.monotonic() - start < 20  # the attempt takes 60 s
        start = time.monotonic()
        assert ask(site, "/healthz")[0].status_code == 503
        assert time.monotonic() - start < TIMEOUT  # a probe that comes later does not wait anew
        assert len(began) == 1
    finally:
        go_on.set()


def test_probe_notices_a_store_that_answers_again(app: Celery, silent: Server) -> None:
    client = client_of(app)
    assert client.get("/healthz").status_code == 503
    silent.resume()
    eventually(lambda: client.get("/healthz").status_code == 200, 10)


def test_flood_of_pages_asks_a_silent_store_a_few_times_and_probes_are_answered(
    app: Celery, silent: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, locks = [], LockControl.locks

    def counted(self: LockControl, **facts: Any) -> Any:
        calls.append(1)
        return locks(self, **facts)

    monkeypatch.setattr(LockControl, "locks", counted)
    site = dashboard(app)
    *pages, probe, script = ask(site, *["/locks"] * 300, "/healthz", "/static/dashboard.js")
    assert {page.status_code for page in pages} == {503}
    assert any("was not asked" in page.text for page in pages)
    assert (probe.status_code, script.status_code) == (503, 200)
    # Those that were asked before the first timeout; afterwards, one at a time tries again.
    assert AT_ONCE <= len(calls) <= 2 * AT_ONCE
    silent.resume()
    eventually(lambda: ask(site, "/locks")[0].status_code == 200, 10)


def test_metrics_say_that_a_silent_store_is_down(app: Celery) -> None:
    assert 'celery_dlock_store_up{server="' in ask(dashboard(app), "/metrics")[0].text
