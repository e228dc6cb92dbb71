"""The dashboard in a real browser."""

import base64
import dataclasses
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from celery_dlock import singleton_task
from celery_dlock.control import Counts, LockControl, LockView, Workers, WorkerView
from celery_dlock.keys.lock_name import LockName, shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import AcquireRequest, Identity, QueueRequest, Requester
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.web import dashboard
from celery_dlock.web.samples import Samples
from tests.contract import queue_helpers as queue
from tests.contract.helpers import NAME, TTL, request_of, take
from tests.contract.test_control_reads import bury, claim, die, every_state, name
from tests.contract.web_helpers import operators_url
from tests.support.browsers import Browser, running_browser, running_site
from tests.support.polling import eventually

pytestmark = pytest.mark.servers

TAB, ENTER, SPACE = "\ue004", "\ue007", " "
LOCK = f"/lock?name={quote(NAME.text)}"
PAGES = [
    "/",
    "/locks",
    LOCK,
    "/waiting",
    "/unknown",
    "/dead",
    "/tasks",
    "/task?name=app.post",
    "/ticks",
    "/explain?id=h",
    "/audit",
    "/health",
    "/nothing",
]
#: The folder of the pictures for the documentation; see `make dashboard-pictures`.
PICTURES = os.environ.get("DLOCK_PICTURES", "")


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    with running_browser() as started:
        yield started


@pytest.fixture
def browser(shared_browser: Browser) -> Browser:
    """A browser without cookies, in its usual size and colours."""
    shared_browser.driver.delete_all_cookies()
    shared_browser.scheme("light")
    shared_browser.wide()
    shared_browser.errors()
    return shared_browser


@pytest.fixture
def app(make_app: Callable[..., Celery], lock_url: str) -> Celery:
    made = make_app(operators_url(lock_url))

    @singleton_task(app=made, name="app.post", key="{customer}", on_conflict="queue")
    def post(customer: str) -> None: ...

    return made


@pytest.fixture
def web(app: Celery) -> Starlette:
    return dashboard(app, access=lambda _: "act", user=lambda _: "ada")


@pytest.fixture
def site(web: Starlette) -> Iterator[str]:
    with running_site(web) as address:
        yield address


def fill(store: RedisStore) -> None:
    every_state(store)
    bury(store, "b")
    die(store, "x")
    claim(store, "x")
    queue.park(store, "w.1", "w", name("g"))


def names_on(browser: Browser) -> list[str]:
    return list(browser.run("return [...document.querySelectorAll('tbody th a.name')].map(one => one.textContent)"))


def test_filter_lists_the_names_of_a_state(browser: Browser, site: str, store: RedisStore) -> None:
    expected = every_state(store)
    browser.open(f"{site}/locks")
    assert set(names_on(browser)) == set(expected)
    browser.click("input[value=used]")
    browser.click("form.filter button")
    eventually(lambda: names_on(browser) == [name("u").text], 10, message="the filter is not applied")
    assert browser.one("input[value=used]").is_selected()


def test_pages_show_every_one_of_10_000_names(browser: Browser, site: str, store: RedisStore) -> None:
    expected = set()
    for number in range(10_000):
        one = name(f"n{number}")
        store.acquire(one, f"{number}.1", 600_000, request_of())  # for longer than a busy machine needs here
        expected.add(one.text)
    found, pages = set[str](), 0
    browser.open(f"{site}/locks?size=500&state=held")
    while True:
        found |= set(names_on(browser))
        pages += 1
        following = browser.all("a[rel=next]")
        if not following:
            break
        browser.open(following[0].get_attribute("href"))
    assert found == expected
    assert pages >= 10
    assert "This is the last page." in browser.text()


def test_unknown_outcome_is_settled_after_a_question(browser: Browser, site: str, store: RedisStore) -> None:
    die(store, "x")
    browser.open(f"{site}/unknown")
    browser.click("form[action$='/do/resolve'] button")
    assert "did its work" in browser.confirm()
    eventually(lambda: "The outcome is settled." in browser.text())
    assert "No run has an unknown outcome." in browser.text()


def test_dead_letters_are_requeued_one_by_one_from_the_second_page(
    browser: Browser, site: str, store: RedisStore, app: Celery
) -> None:
    for number in range(27):
        bury(store, f"n{number}")
    browser.open(f"{site}/dead?size=25").click("a[rel=next]")
    eventually(lambda: "This is the last page." in browser.text())
    shown = names_on(browser)
    assert len(shown) == 2
    browser.click("form[action$='/do/requeue'] button")
    eventually(lambda: "The dead letter is back in its queue." in browser.text())
    with LockControl(app) as control:
        assert {letter.name for letter in control.dead_letters().items} == {
            name(f"n{number}").text for number in range(27)
        } - set(shown[:1])


def test_ticks_and_waiting_calls_are_shown(browser: Browser, site: str, store: RedisStore, app: Celery) -> None:
    @singleton_task(app=app, name="app.report", once_per="tick")
    def report() -> None: ...

    app.conf.beat_schedule = {"nightly": {"task": "app.report", "schedule": 3600}}
    assert "no run has succeeded yet" in browser.open(f"{site}/ticks").text()
    queue.take(store, "h.1", "h", NAME)
    for number in range(12):
        queue.park(store, f"w{number}.1", f"w{number}", NAME)
    assert "and 2 more, on the page of the lock" in browser.open(f"{site}/waiting").text()
    browser.click("tbody tr:last-child a.name")
    eventually(lambda: "w11" in browser.text())


def test_refused_release_shows_the_reason_and_the_way_back(browser: Browser, site: str, store: RedisStore) -> None:
    take(store, "x.1", request_of("x"))
    browser.open(f"{site}{LOCK}")
    browser.click("form[action$='/do/release'] button")
    browser.confirm()
    eventually(lambda: "its holder is alive" in browser.text())
    browser.click("main a[href*='/lock?']")
    browser.click("input[name=force]")
    browser.click("form[action$='/do/release'] button")
    browser.confirm()
    eventually(lambda: "The lock is released." in browser.text())
    assert store.inspect(NAME) is None


@pytest.mark.invariant("stale-page-hits-no-successor")
def test_stale_page_is_refused(browser: Browser, site: str, store: RedisStore) -> None:
    take(store, "x.1", request_of("x"))
    browser.open(f"{site}{LOCK}")
    store.release(NAME, "x.1", ReleaseRequest())
    take(store, "y.1", request_of("y"))
    browser.click("input[name=force]")
    browser.click("form[action$='/do/release'] button")
    browser.confirm()
    eventually(lambda: "another acquisition holds it now" in browser.text())
    assert store.inspect(NAME)


@pytest.mark.invariant("forged-requests-change-nothing")
def test_form_of_another_site_changes_nothing(browser: Browser, site: str, store: RedisStore) -> None:
    take(store, "x.1", request_of("x"))
    token = browser.open(f"{site}{LOCK}").one("input[name=csrf]").get_attribute("value")
    fields = {"name": NAME.text, "acquisition": "x.1", "force": "yes", "csrf": token}
    inputs = "".join(f"<input name='{key}' value='{value}'>" for key, value in fields.items())
    page = f"<form method=post action='{site}/do/release'>{inputs}<button>Win a prize</button></form>"
    with running_site(Starlette(routes=[Route("/", lambda _: HTMLResponse(page))])) as other:
        # Ports do not tell sites apart, so the other one needs another name too.
        browser.open(other.replace("127.0.0.1", "localhost")).click("button")
        eventually(lambda: "Nothing was changed" in browser.text())
        browser.open(other).click("button")
        eventually(lambda: "Nothing was changed" in browser.text())
    assert store.inspect(NAME)


def test_dashboard_in_a_frame_is_not_shown(browser: Browser, site: str) -> None:
    page = f"<iframe src='{site}/'></iframe>"
    with running_site(Starlette(routes=[Route("/", lambda _: HTMLResponse(page))])) as other:
        browser.open(other)
        assert any("frame-ancestors" in error for error in eventually(browser.errors))


def test_everything_works_without_javascript(site: str, store: RedisStore) -> None:
    fill(store)
    with running_browser(scripts=False) as browser:
        for path in PAGES:
            assert browser.open(f"{site}{path}").all("main h1")
        browser.open(f"{site}/unknown").click("form[action$='/do/resolve'] button")
        eventually(lambda: "The outcome is settled." in browser.text())
        held = quote(name("h").text)
        browser.open(f"{site}/lock?name={held}").click("form[action$='/do/release'] button")
        eventually(lambda: "its holder is alive" in browser.text())
        assert browser.all("button[type=button]") == []  # made by the script


def test_no_page_scrolls_sideways_at_320_pixels(browser: Browser, site: str, store: RedisStore) -> None:
    fill(store)
    take(store, "long.1", request_of("l" * 36), name=name("a-long-name-without-any-space-" * 4))
    browser.narrow(320)
    for path in PAGES:
        browser.open(f"{site}{path}")
        assert browser.run("return document.documentElement.scrollWidth") <= 320, path


@pytest.mark.parametrize("width", [1920, 1280, 800, 375])
def test_cards_of_the_overview_fill_their_rows(browser: Browser, site: str, width: int) -> None:
    browser.narrow(width)
    browser.open(f"{site}/")
    edges = browser.run(
        "return [document.querySelector('.cards'), ...document.querySelectorAll('.cards li')]"
        ".map(one => one.getBoundingClientRect()).map(one => [Math.round(one.top), Math.round(one.right)])"
    )
    (_, end), *cards = edges
    assert len(cards) == 7
    assert {max(right for top, right in cards if top == row) for row, _ in cards} == {end}


@pytest.mark.parametrize("scripts", [True, False])
def test_navigation_on_a_phone_is_a_menu(site: str, scripts: bool) -> None:
    with running_browser(scripts=scripts) as browser:
        browser.narrow(375)
        browser.open(f"{site}/")
        links = browser.all("nav a[href='/ticks']")
        assert [link.is_displayed() for link in links] == [False, False]
        browser.click("nav summary")
        assert [link.is_displayed() for link in links] == [False, True]
        browser.click("nav.narrow a[href='/ticks']")
        eventually(lambda: "Ticks" in browser.one("main h1").text)


def test_lock_is_released_with_the_keyboard_only(browser: Browser, site: str, store: RedisStore) -> None:
    take(store, "x.1", request_of("x"))
    browser.open(f"{site}/locks")
    browser.press(TAB)
    assert browser.run("return document.activeElement.textContent") == "Skip to the content"
    browser.press(ENTER)
    tab_to(browser, f"a[href='{LOCK}']")
    browser.press(ENTER)
    eventually(lambda: browser.all("form[action$='/do/release']"))
    tab_to(browser, "input[name=force]")
    browser.press(SPACE)
    tab_to(browser, "form[action$='/do/release'] button")
    browser.press(ENTER)
    browser.confirm()
    eventually(lambda: "The lock is released." in browser.text())


def tab_to(browser: Browser, selector: str) -> None:
    for _ in range(60):
        browser.press(TAB)
        if browser.run(f"return document.activeElement.matches({selector!r})"):
            assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError(f"{selector} is not reached by the tabulator key")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 320])
def test_axe_finds_nothing_and_the_browser_logs_no_error(
    browser: Browser, site: str, store: RedisStore, scheme: str, width: int
) -> None:
    fill(store)
    browser.scheme(scheme)
    browser.narrow(width)
    for path in PAGES:
        browser.open(f"{site}{path}")
        assert browser.violations() == [], path
        shade = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert shade == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(21, 25, 28)")
    assert [error for error in browser.errors() if "404" not in error] == []


def test_table_refreshes_by_itself_and_rests_while_it_is_used(browser: Browser, site: str, store: RedisStore) -> None:
    browser.open(f"{site}/locks")
    assert names_on(browser) == []
    take(store, "x.1", request_of("x"))
    eventually(lambda: names_on(browser) == [NAME.text], 20)
    browser.click("#task")
    take(store, "y.1", request_of("y"), name=name("y"))
    browser.one("#task").send_keys("app.post")
    assert browser.one("#task").get_attribute("value") == "app.post"


# -- pictures for the documentation


def stock(store: RedisStore) -> None:
    """Fill the store as a shop would."""

    def by(task: str, worker: str, text: str = "") -> tuple[Requester, Identity]:
        task_id = str(uuid.uuid5(uuid.NAMESPACE_URL, task + text))
        return Requester.of(task, task_id, worker, 4711), Identity(task_id)

    def hold(text: str, task: str, worker: str, **facts: Any) -> tuple[LockName, str]:
        one, acquisition = shared_name(text), uuid.uuid4().hex
        store.acquire(one, acquisition, TTL, AcquireRequest(*by(task, worker, text), **facts))
        return one, acquisition

    for number, worker in enumerate(("shop1", "shop2", "shop1", "shop3"), 4201):
        hold(f"invoice:{number}", "shop.send_invoice", f"celery@{worker}", once=True)
    stock_of = hold("stock:berlin", "shop.update_stock", "celery@shop2", queue=QueueRequest())[0]
    for number in range(1, 4):
        requester, identity = by("shop.update_stock", "celery@shop3", str(number))
        entry = queue.entry_of(requester.task_id, task="shop.update_stock")
        request = AcquireRequest(requester, identity, queue=QueueRequest(entry=entry))
        store.acquire(stock_of, uuid.uuid4().hex, TTL, request)
    hold("report:daily", "shop.daily_report", "celery@shop1", min_hold_ms=600_000)
    for customer in ("ada", "grace"):
        one, acquisition = hold(f"sms:{customer}", "shop.send_sms", "celery@shop3", once=True)
        store.release(one, acquisition, ReleaseRequest(outcome_unknown=True))


def remember(samples: Samples, lock: LockView) -> None:
    """Fill the last hour with what the workers of a shop would have told, and with earlier holders of a lock."""
    now, nothing = time.time(), Counts({}, {}, {}, {}, {}, {}, {}, {})
    told = Counter[str]()
    for ago in range(3600, 0, -30):
        busy = 10 + ago // 120 % 14
        told.update(taken=busy, skipped=busy // 3, queued=busy // 4 if ago < 2400 else 0, lost=ago == 1500)
        counters = {
            "acquired": {"shop.send_invoice": {"": told["taken"]}},
            "conflicts": {"shop.update_stock": {"skipped": told["skipped"], "queued": told["queued"]}},
            "lost": {"shop.update_stock": {"forgotten": told["lost"]}},
        }
        waiting = max(0, 7 - abs(ago - 1200) // 150) + (3 if ago < 400 else 0)
        counts = dataclasses.replace(nothing, waiting={"shop.update_stock": waiting})
        # A new holder takes the lock every seven minutes, and releases it after six.
        run, left = divmod(ago, 420)
        assert lock.holder
        holder = dataclasses.replace(
            lock.holder,
            acquisition=f"{run}.1",
            task_id=str(uuid.uuid5(uuid.NAMESPACE_URL, str(run))),
            worker=f"celery@shop{run % 3 + 1}",
            since=lock.at - 420 * run - 419,
        )
        seen = dataclasses.replace(lock, holder=holder, waiting=waiting, at=lock.at - ago)
        workers = Workers([WorkerView("celery@shop1", pid=7, counters=counters)])
        samples.add(now - ago - 30, now - ago, counts, {lock.name: seen} if left > 60 else {}, workers)


@pytest.mark.skipif(not PICTURES, reason="only for `make dashboard-pictures`")
def test_pictures(browser: Browser, app: Celery, web: Starlette, site: str, store: RedisStore) -> None:
    @singleton_task(
        app=app, name="shop.send_sms", key="sms:{customer}", scope="shared", once_per=86400, after_crash="hold"
    )
    def send_sms(customer: str) -> None: ...

    @singleton_task(app=app, name="shop.update_stock", key="stock:{city}", scope="shared", on_conflict="queue")
    def update_stock(city: str) -> None: ...

    stock(store)
    with LockControl(app, "grace") as control:
        control.hold(shared_name("gateway").text, 7200, "the SMS gateway is down, ticket 1337")
        remember(web.state.sampler.samples, control.lock(shared_name("stock:berlin").text))
    lock = f"/lock?name={quote(shared_name('stock:berlin').text)}"
    for shown, path in (("overview", "/"), ("locks", "/locks"), ("lock", lock), ("unknown", "/unknown")):
        browser.narrow(1280, 400)
        browser.open(f"{site}{path}")
        browser.narrow(1280, min(1400, browser.run("return document.documentElement.scrollHeight")))
        picture = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
        (Path(PICTURES) / f"{shown}.png").write_bytes(base64.b64decode(picture))
