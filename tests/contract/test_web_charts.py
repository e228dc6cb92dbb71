"""The charts of the last hour on the pages of the dashboard, from samples of a real store."""

import re
from collections.abc import Callable
from urllib.parse import quote

import pytest
from celery import Celery
from starlette.testclient import TestClient

from celery_dlock import singleton_task
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.web import dashboard
from celery_dlock.web.server import protected
from tests.contract import queue_helpers as queue
from tests.contract.helpers import NAME, request_of, take
from tests.contract.web_helpers import SITE, operators_url
from tests.support.polling import eventually


@pytest.fixture
def operated(make_app: Callable[..., Celery], lock_url: str) -> Celery:
    return make_app(operators_url(lock_url))


def totals(text: str) -> dict[str, str]:
    """Return the number of each chart of a page by its title; "-" for an unknown one."""
    found = re.findall(r"<figcaption>(.*?) <b>(.*?)</b>", text)
    return {title: number if number.isdigit() else "-" for title, number in found}


def test_overview_and_page_of_a_task_show_their_waiting_calls(operated: Celery, store: RedisStore) -> None:
    @singleton_task(app=operated, name="app.post", on_conflict="queue")
    def post() -> None: ...

    queue.take(store, "h.1", "h", NAME)
    for number in range(3):
        queue.park(store, f"w{number}.1", f"w{number}", NAME)
    made = dashboard(operated)
    made.state.sampler.sample()
    web = TestClient(made, base_url=SITE)
    unknown = {"Locks taken": "-", "Conflicts": "-", "Lost leases": "-"}  # no worker counts
    overview = web.get("/").text
    assert totals(overview) == {**unknown, "Waiting calls, most at once": "3"}
    assert "No live worker counts: set" in overview
    assert re.search(r'role="img" aria-label="Waiting calls, most at once\. Maximum of [^"]* 3"', overview)
    (page,) = re.findall(r'href="(/task\?name=app\.post)"', overview)
    shown = web.get(page)
    assert (shown.status_code, totals(shown.text)["Waiting calls, most at once"]) == (200, "3")
    assert "a call whose lock is held waits in the queue" in shown.text
    other = web.get("/task?name=other")
    assert (other.status_code, totals(other.text)["Waiting calls, most at once"]) == (404, "0")


def test_page_of_a_lock_shows_its_earlier_holders(operated: Celery, store: RedisStore) -> None:
    made = dashboard(operated)
    take(store, "x.1", request_of("x"))
    made.state.sampler.sample()
    store.release(NAME, "x.1", ReleaseRequest())
    made.state.sampler.sample()
    take(store, "y.1", request_of("y"))
    text = TestClient(made, base_url=SITE).get(f"/lock?name={quote(NAME.text)}").text
    assert totals(text)["Holders"] == "2"
    holders = text[text.index('aria-label="Holders"') : text.index("<h2>Actions")] if "<h2>Actions" in text else text
    assert re.findall(r"/explain\?id=(\w)", holders)[:2] == ["y", "x"]


def test_page_starts_the_samples_and_machines_do_not(operated: Celery, store: RedisStore) -> None:
    """Prometheus asks for ever. That must not make a dashboard sample without a visitor."""
    take(store, "x.1", request_of("x"))
    made = dashboard(operated)
    web = TestClient(made, base_url=SITE)
    for path in ("/metrics", "/healthz", "/api/v1/locks"):
        assert web.get(path).status_code == 200
    assert not made.state.sampler._loop.running.locked()
    assert made.state.sampler.samples.hour() == []
    web.get("/")
    eventually(made.state.sampler.samples.hour)


def test_dashboard_of_the_command_samples_without_a_visitor(operated: Celery) -> None:
    made = protected(operated, "127.0.0.1", None, None)
    eventually(made.state.sampler.samples.hour)  # type: ignore[attr-defined]
