"""The dashboard's pages and its API, by HTTP, with an operator's rights in the store."""
# ruff: noqa: F811 - the fixture `run` is imported

import base64
import html
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
from celery import Celery
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from celery_dlock import LockOptions, singleton_task
from celery_dlock.control import LockControl
from celery_dlock.errors import CallNotRun, LockHeld, StoreUnavailable
from celery_dlock.keys.lock_name import name_from_text
from celery_dlock.messaging.results import CallSkipped
from celery_dlock.messaging.tick_header import Tick
from celery_dlock.reports.options import option_lines
from celery_dlock.reports.tables import LOCKS
from celery_dlock.store.model import AcquireRequest, Identity, Requester
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.web import dashboard
from celery_dlock.web.state import DashboardState
from tests.contract import queue_helpers as queue
from tests.contract.helpers import NAME, ending_of, request_of, take
from tests.contract.test_cli import SCHEMA, Run, lines, misfit, module, run  # noqa: F401  # fixtures are found by being here
from tests.contract.test_control_reads import bury, claim, die, every_state, name, use
from tests.contract.web_helpers import SITE, client_of, form_on, operators_url, send
from tests.support.polling import eventually
from tests.support.servers import Server

PAGES = ["/", "/locks", "/waiting", "/unknown", "/dead", "/tasks", "/workers", "/ticks", "/explain",
         "/explain?id=h", "/audit", "/health"]  # fmt: skip


@pytest.fixture
def operated(make_app: Callable[..., Celery], lock_url: str) -> Celery:
    """An app whose dashboard has an operator's rights."""
    return make_app(operators_url(lock_url))


@pytest.fixture
def web(operated: Celery) -> Iterator[TestClient]:
    with TestClient(dashboard(operated), base_url=SITE) as client:
        yield client


def wait(store: RedisStore, text: str, *more: str) -> None:
    """Let calls wait for a held lock."""
    queue.take(store, f"{text}h.1", f"{text}h", name(text))
    for task_id in (text, *more):
        queue.park(store, f"{task_id}.1", task_id, name(text))


def names_on(text: str) -> list[str]:
    """Return the lock names that a page links."""
    return re.findall(r'<th scope="row"><a class="name" href="[^"]*/lock\?name=[^"]*">([^<]*)</a>', text)


@pytest.mark.parametrize("path", PAGES)
def test_every_page_answers_with_an_empty_and_with_a_full_store(web: TestClient, store: RedisStore, path: str) -> None:
    assert web.get(path).status_code == 200
    every_state(store)
    bury(store, "b")
    answer = web.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_locks_lists_each_state_and_filters(web: TestClient, store: RedisStore) -> None:
    expected = every_state(store)
    assert set(names_on(web.get("/locks").text)) == set(expected)
    for text, state in expected.items():
        assert names_on(web.get("/locks", params={"state": state}).text) == [text]
    assert len(names_on(web.get("/locks?state=held&state=used").text)) == 2
    assert names_on(web.get("/locks", params={"name": "h:"}).text) == [name("h").text]
    assert names_on(web.get("/locks", params={"name": "h:*"}).text) == [name("h").text]
    assert names_on(web.get("/locks", params={"older": "1h"}).text) == []
    assert names_on(web.get("/locks", params={"task": "app.other"}).text) == []


BAD_CURSORS = [
    "cursor=" + base64.urlsafe_b64encode(made.encode()).decode()
    for made in ("[" * 30_000, '["", "\u00b2"]', f'["", "{2**64}"]', '["", "-1"]', '["elsewhere", "0"]', '["", {}]')
]


@pytest.mark.parametrize("query", ["state=open", "older=soon", "cursor=%00", "cursor=9", *BAD_CURSORS])
def test_malformed_filter_is_answered_with_400(web: TestClient, query: str) -> None:
    answer = web.get(f"/locks?{query}")
    assert (answer.status_code, "Traceback" in answer.text) == (400, False)


def test_pages_of_locks_show_every_name(web: TestClient, store: RedisStore) -> None:
    expected = {name(f"n{number}").text for number in range(300)}
    for text in range(300):
        take(store, f"{text}.1", request_of(), name=name(f"n{text}"))
    found, path, pages = set[str](), "/locks?size=25&state=held", 0
    while path:
        text = web.get(path).text
        found |= set(names_on(text))
        following = re.search(r'<a href="([^"]*)" rel="next">', text)
        path = following[1].replace("&amp;", "&") if following else ""
        pages += 1
    assert found == expected
    assert pages >= 5


@pytest.mark.parametrize(("path", "put"), [("/waiting", wait), ("/dead", bury), ("/unknown", die)])
def test_pages_of_other_lists_show_every_entry_once(
    web: TestClient, store: RedisStore, path: str, put: Callable[[RedisStore, str], None]
) -> None:
    for number in range(60):
        put(store, f"n{number}")
    found, following, pages = [], f"{path}?size=25", 0
    while following:
        text = web.get(following).text
        found += names_on(text)
        match = re.search(r'<a href="([^"]*)" rel="next">', text)
        following = html.unescape(match[1]) if match else ""
        pages += 1
    assert sorted(found) == sorted(name(f"n{number}").text for number in range(60))
    assert pages == 3
    assert "This is the last page." in text


@pytest.mark.parametrize("path", ["/dead", "/unknown"])
def test_page_follows_the_entry_that_its_cursor_names_also_when_that_is_settled(
    web: TestClient, store: RedisStore, operated: Celery, path: str
) -> None:
    control = LockControl(operated)
    for number in range(30):
        (bury if path == "/dead" else die)(store, f"n{number}")
    first = web.get(f"{path}?size=25").text
    match = re.search(r'<a href="([^"]*)" rel="next">', first)
    assert match
    for text in names_on(first):
        if path == "/dead":
            control.requeue(text, control.dead_letters(text).items[0].identity)
        else:
            control.resolve(text, sent=True)
    rest = names_on(web.get(html.unescape(match[1])).text)
    assert sorted(names_on(first) + rest) == sorted(name(f"n{number}").text for number in range(30))


@pytest.mark.parametrize("kind", [CallSkipped, LockHeld])
def test_call_that_did_not_run_links_the_lock_that_refused_it(operated: Celery, kind: type[CallNotRun]) -> None:
    operated.conf.result_backend = "cache+memory://"
    error = kind(f"{NAME}: held by app.post[x] on node1", NAME.text, "x", "node1", 1.0)
    operated.backend.store_result("skipped", error, "REVOKED" if kind is CallSkipped else "FAILURE")
    text = client_of(operated).get("/explain?id=skipped").text
    assert "It did not run because of the lock <a" in text
    assert f'href="/lock?name={quote(NAME.text, safe="")}"' in text


def test_name_in_a_result_that_is_no_lock_name_is_not_linked(operated: Celery) -> None:
    operated.conf.result_backend = "cache+memory://"
    operated.backend.store_result("odd", CallSkipped("odd", "<no lock name>"), "REVOKED")
    text = client_of(operated).get("/explain?id=odd").text
    assert "its result is REVOKED" in text
    assert "because of the lock" not in text


@pytest.mark.parametrize("path", ["/waiting", "/dead", "/unknown", "/api/v1/dead", "/api/v1/unknown"])
def test_malformed_cursor_of_a_list_is_answered_with_400(web: TestClient, path: str) -> None:
    answer = web.get(path, params={"cursor": "nonsense"})
    assert (answer.status_code, "Traceback" in answer.text) == (400, False)


def test_api_pages_dead_letters(web: TestClient, store: RedisStore) -> None:
    for number in range(3):
        bury(store, f"n{number}")
    first = web.get("/api/v1/dead?limit=2").json()
    second = web.get("/api/v1/dead", params={"limit": 2, "cursor": first["cursor"]}).json()
    assert (len(first["items"]), len(second["items"]), second["cursor"]) == (2, 1, None)
    assert len({item["name"] for item in first["items"] + second["items"]}) == 3


def test_long_queue_is_shown_in_part_and_whole_on_the_page_of_its_lock(web: TestClient, store: RedisStore) -> None:
    wait(store, "x", *(f"w{number}" for number in range(109)))
    assert "and 100 more, on the page of the lock" in web.get("/waiting").text
    page = web.get("/lock", params={"name": NAME.text}).text
    assert "110 wait; these are the first 100." in page
    match = re.search(r'<a href="([^"]*)">Show up to 1000</a>', page)
    assert match
    whole = web.get(html.unescape(match[1])).text
    assert ("w108<" in page, "w108<" in whole, "these are the first" in whole) == (False, True, False)


def test_lock_shows_facts_waiters_and_next_call(web: TestClient, store: RedisStore) -> None:
    take(store, "x.1", request_of("x"))
    text = web.get("/lock", params={"name": NAME.text}).text
    assert "app.post[x] on node1 (process 77)" in text
    assert "meets a held lock" in text
    assert "yes: renewed within half its ttl" in text
    assert web.get("/lock", params={"name": name("free").text}).status_code == 404
    assert web.get("/lock", params={"name": "no name"}).status_code == 400


def test_tasks_tell_how_long_a_debounced_call_waits() -> None:
    lines = option_lines(LockOptions(on_conflict="queue", debounce=5))
    assert "a call waits until no newer call has come for 5 s, and at most 50 s" in lines


def test_unknown_outcome_shows_its_idempotency_key(web: TestClient, store: RedisStore) -> None:
    die(store, "x")
    (run,) = web.get("/api/v1/unknown").json()["items"]
    assert run["idempotency_key"] in web.get("/unknown").text


@pytest.mark.parametrize(
    ("path", "put", "command"),
    [("/unknown", die, "dlock resolve NAME --sent"), ("/dead", bury, "dlock dead requeue NAME/ID")],
)
def test_page_whose_actions_are_not_permitted_names_the_command(
    web: TestClient,
    operated: Celery,
    store: RedisStore,
    path: str,
    put: Callable[[RedisStore, str], None],
    command: str,
) -> None:
    assert command not in web.get(path).text  # nothing to settle
    put(store, "x")
    assert command in web.get(path).text
    with TestClient(dashboard(operated, access=lambda _: "act"), base_url=SITE) as operator:
        assert command not in operator.get(path).text


@pytest.mark.parametrize(
    "path",
    ["locks", f"lock?name={quote(NAME.text)}", "waiting", "unknown", "dead", "claims", "explain?id=h", "check"],
)
def test_api_serves_the_documents_of_the_command_line(web: TestClient, store: RedisStore, path: str) -> None:
    every_state(store)
    bury(store, "b")
    claim(store, "x")
    answer = web.get(f"/api/v1/{path}")
    assert answer.status_code == 200
    assert misfit(answer.json(), SCHEMA) == ""


class TestHostileText:
    """Text from tasks and operators is shown as text."""

    TEXT = "<script>alert(1)</script>\"'&"

    @pytest.mark.invariant("dashboard-shows-text-as-text")
    def test_markup_in_a_lock_name_task_and_reason_is_escaped(self, operated: Celery, store: RedisStore) -> None:
        hostile = name(self.TEXT)
        by = AcquireRequest(Requester(self.TEXT, self.TEXT, self.TEXT, "7"), Identity("x"))
        take(store, "x.1", by, name=hostile)
        LockControl(operated, self.TEXT).hold(hostile.text, 60, self.TEXT)
        client = client_of(operated)
        for path in ("/", "/locks", f"/lock?name={quote(hostile.text)}", "/audit", f"/explain?id={quote(self.TEXT)}",
                     f"/locks?name={quote(self.TEXT)}&task={quote(self.TEXT)}&older={quote(self.TEXT)}",
                     f"/lock?name={quote(self.TEXT)}", f"/{quote(self.TEXT)}"):  # fmt: skip
            text = client.get(path).text
            assert "<script>alert" not in text, path
        assert "&lt;script&gt;alert(1)" in client.get("/locks").text

    @pytest.mark.invariant("dashboard-shows-text-as-text")
    @pytest.mark.parametrize(
        "path", ["/", "/locks", "/nothing", "/do/release", "/static/dashboard.js", "/api/v1/locks"]
    )
    def test_headers_forbid_inline_scripts_frames_and_caches(self, web: TestClient, path: str) -> None:
        headers = web.get(path).headers
        assert "script-src 'self';" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")

    def test_no_page_has_inline_scripts_or_styles(self, operated: Celery, store: RedisStore) -> None:
        every_state(store)
        client = client_of(operated)
        for path in [*PAGES, "/task?name=t", "/lock?name=" + quote(name("h").text)]:
            text = client.get(path).text
            assert re.findall(r"<script(?! src=)|<style|\sstyle=|\son\w+=|javascript:", text) == []


@pytest.mark.parametrize("prefix", ["/ops/dlock", ""])
def test_mounted_dashboard_links_and_posts_under_its_path(operated: Celery, store: RedisStore, prefix: str) -> None:
    take(store, "x.1", request_of("x"))
    site = Starlette(routes=[Mount(prefix, dashboard(operated, access=lambda _: "act"))])
    client = TestClient(site, base_url=SITE, follow_redirects=False)
    page = client.get(f"{prefix}/lock", params={"name": NAME.text})
    links = re.findall(r'(?:href|src|action)="([^"]*)"', page.text)
    assert [link for link in links if not link.startswith((f"{prefix}/", "#"))] == []
    assert client.get(f"{prefix}/static/dashboard.css").status_code == 200
    assert f"path={prefix or '/'};" in page.headers["set-cookie"].lower()
    answer = send(client, form_on(client, f"{prefix}/lock?name={quote(NAME.text)}", "release"), force="yes")
    assert answer.headers["location"].startswith(f"{prefix}/lock?")
    assert store.inspect(NAME) is None


def test_store_that_is_away_is_named_with_503_and_no_traceback(
    make_app: Callable[..., Celery], own_server: Callable[[], Server]
) -> None:
    server = own_server()
    client = client_of(make_app(server.url(), dlock_timeout=0.5))
    server.stop()
    for path in ("/", "/locks", "/lock?name=" + quote(NAME.text), "/health", "/waiting", "/tasks", "/api/v1/locks"):
        answer = client.get(path)
        assert (answer.status_code, "Traceback" in answer.text) == (503, False), path
    assert "The lock store does not answer" in client.get("/waiting").text
    assert client.get("/healthz").status_code == 503
    assert 'server="' in client.get("/metrics").text


def test_requests_that_wait_for_a_count_of_a_silent_store_share_its_error(
    operated: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, counts = [], threading.Event()

    def silent(_control: LockControl) -> None:
        began.append(1)
        counts.wait(5)
        raise StoreUnavailable("silent")

    monkeypatch.setattr(LockControl, "counts", silent)
    state = DashboardState(operated, lambda _: "read", None)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(state.counts) for _ in range(8)]
        eventually(lambda: pool._work_queue.empty() and began)
        counts.set()
        errors = [one.exception() for one in asked]
    assert [str(error) for error in errors] == ["silent"] * 8
    assert len(began) == 1
    with pytest.raises(StoreUnavailable):
        state.counts()
    assert len(began) == 2  # a later request asks the store again


def test_metrics_show_the_gauges_of_the_store(web: TestClient, store: RedisStore) -> None:
    take(store, "x.1", request_of("x"))
    answer = web.get("/metrics")
    assert 'celery_dlock_locks{task="app.post"} 1.0' in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


def test_tasks_shows_the_options_in_words_and_no_result(operated: Celery, web: TestClient) -> None:
    @singleton_task(app=operated, name="shop.sell", key="{customer}", once_per=3600, skip_result="s3cret")
    def sell(customer: str) -> None: ...

    text = web.get("/tasks").text
    assert "a call whose lock is held is skipped" in text
    assert "a name stays used for 3600 s after a success" in text
    assert "s3cret" not in text


def test_ticks_shows_where_the_last_tick_ran(operated: Celery, web: TestClient, store: RedisStore) -> None:
    @singleton_task(app=operated, name="shop.report", once_per="tick")
    def report() -> None: ...

    assert "No entry of the schedule" in web.get("/ticks").text
    operated.conf.beat_schedule = {"nightly <report>": {"task": "shop.report", "schedule": 3600}}
    assert "no run has succeeded yet" in web.get("/ticks").text
    for tick in LockControl(operated).ticks():
        digest = Tick("nightly <report>", tick.due).digest
        take(store, "x.1", request_of("x", once=True, tick=digest), name=name_from_text(tick.name))
        store.release(name_from_text(tick.name), "x.1", ending_of("x", once=True, used_ms=60_000, tick=digest))
    text = web.get("/ticks").text
    assert "nightly &lt;report&gt;" in text
    assert "<td>ran</td><td>node1</td>" in text


def test_overview_and_tasks_say_that_no_worker_answers(web: TestClient) -> None:
    assert "</b> lost in the last hour" in web.get("/").text
    eventually(lambda: "leases; no worker answered" in web.get("/").text, 10)
    assert "No live worker counts conflicts" in web.get("/tasks").text


def test_workers_page_says_why_no_worker_answers(web: TestClient) -> None:
    page = web.get("/workers")
    assert (page.status_code, "no worker" in page.text) == (200, True)
    answer = web.get("/api/v1/workers")
    assert (answer.status_code, "no worker" in answer.json()["error"]) == (404, True)


def test_every_fact_of_a_lock_is_shown_by_the_command_the_dashboard_and_json(
    web: TestClient, store: RedisStore, run: Run, operated: Celery
) -> None:
    """So a new fact is one entry of the table."""
    use(store, "x")
    claim(store, "x")
    wait(store, "x", "w")
    LockControl(operated).hold(NAME.text, 60, "why")
    view = LockControl(operated).lock(NAME.text)
    facts = {fact for fact in LOCKS.details if fact.text(view)}
    assert {fact.key for fact in set(LOCKS.details) - facts} == {"holder.kept_by", "has_dead_letters"}
    page, shown = web.get("/lock", params={"name": NAME.text}).text, run("show", NAME.text).stdout
    assert [fact for fact in facts if f"{fact.title.lower()}: " not in shown] == []
    assert {fact.key for fact in facts if f"<dt>{fact.title}" not in page} == {"name", "states"}
    (row,) = web.get("/api/v1/lock", params={"name": NAME.text}).json()["items"]
    assert json.loads(run("show", NAME.text, "--json").stdout)["items"][0].keys() == row.keys()
    assert [fact for fact in (*facts, *LOCKS.columns) if fact.key.partition(".")[0] not in row] == []
    listed, headings = web.get("/locks").text, lines(run("list"))[0]
    assert headings == [fact.title.upper() for fact in LOCKS.columns]
    assert re.findall(r'<th scope="col"[^>]*>([^<(]*?)(?: \(UTC\))?</th>', listed) == [
        fact.title for fact in LOCKS.columns
    ]
