"""Changes through the dashboard: what each does, who may do it, and what refuses a forged or a stale one."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from starlette.requests import Request
from starlette.testclient import TestClient

from celery_dlock.control import LockControl
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.web import ACTIONS, dashboard
from tests.contract.helpers import NAME, request_of, take
from tests.contract.test_control_reads import bury, claim, die, use
from tests.contract.web_helpers import SITE, client_of, form_on, forms_on, operators_url, send

LOCK = f"/lock?name={quote(NAME.text)}"


@pytest.fixture
def app(make_app: Callable[..., Celery], lock_url: str) -> Celery:
    return make_app(operators_url(lock_url))


@pytest.fixture
def web(app: Celery) -> TestClient:
    return client_of(app, user=lambda _: "ada")


@pytest.fixture
def control(app: Celery) -> LockControl:
    return LockControl(app)


def test_release_of_a_fresh_lease_is_refused_with_its_reason_until_it_is_forced(
    store: RedisStore, web: TestClient, control: LockControl
) -> None:
    take(store, "x.1", request_of("x"))
    form = form_on(web, LOCK, "release")
    refused = send(web, form)
    assert (refused.status_code, "its holder is alive" in refused.text) == (409, True)
    assert "a release by force frees it" in refused.text
    assert store.inspect(NAME)
    done = send(web, form, force="yes", reason="ticket 7")
    assert (done.status_code, done.headers["location"]) == (303, f"{LOCK}&done=release")
    assert store.inspect(NAME) is None
    (record,) = control.audit()
    assert (record.action, record.user, record.reason) == ("release", "ada", "ticket 7")
    assert "The lock is released." in web.get(done.headers["location"]).text


def test_hold_and_unhold(web: TestClient, control: LockControl) -> None:
    assert send(web, form_on(web, LOCK, "hold"), for_="soon", reason="why").status_code == 400
    assert send(web, form_on(web, LOCK, "hold"), for_="2h", reason="").status_code == 400
    assert control.lock(NAME.text).states == ()
    assert send(web, form_on(web, LOCK, "hold"), for_="2h", reason="gateway is down").status_code == 303
    assert "gateway is down" in web.get(LOCK).text
    assert send(web, form_on(web, LOCK, "unhold")).status_code == 303
    assert control.lock(NAME.text).states == ()


def test_page_after_a_hold_says_whether_it_has_begun(store: RedisStore, web: TestClient) -> None:
    how = {"for_": "2h", "reason": "gateway is down"}
    now = send(web, form_on(web, LOCK, "hold"), **how)
    assert "The lock is held." in web.get(now.headers["location"]).text
    send(web, form_on(web, LOCK, "unhold"))
    take(store, "x.1", request_of("x"))
    later = send(web, form_on(web, LOCK, "hold"), **how)
    text = web.get(later.headers["location"]).text
    assert "The lock will be held when its present holder releases it." in text
    assert "The lock is held." not in text


@pytest.mark.parametrize(("sent", "states"), [("yes", ("used",)), ("no", ())])
def test_unknown_outcome_is_settled(
    store: RedisStore, web: TestClient, control: LockControl, sent: str, states: tuple[str, ...]
) -> None:
    die(store, "x")
    answer = send(web, form_on(web, "/unknown", "resolve", sent=sent))
    assert (answer.status_code, answer.headers["location"]) == (303, "/unknown?done=resolve")
    assert (control.lock(NAME.text).states, control.unknown_outcomes().items) == (states, ())


def test_dead_letters_are_requeued_and_dropped(store: RedisStore, web: TestClient, control: LockControl) -> None:
    bury(store, "x")
    assert send(web, form_on(web, "/dead", "requeue")).status_code == 303
    assert (control.dead_letters().items, [one.task_id for one in control.waiting()]) == ((), ["x"])
    # The task of the message is not registered, so its end cannot be stored.
    undropped = send(web, form_on(web, "/waiting", "drop"))
    assert (undropped.status_code, "its end could not be stored" in undropped.text) == (409, True)
    assert (control.waiting(), len(control.dead_letters().items)) == ((), 1)


def test_run_mark_and_claim_are_deleted(store: RedisStore, web: TestClient, control: LockControl) -> None:
    use(store, "x")
    claim(store, "x")
    assert control.lock(NAME.text).states == ("used", "claimed")
    assert send(web, form_on(web, LOCK, "forget")).status_code == 303
    assert send(web, form_on(web, LOCK, "drop_claim")).status_code == 303
    assert control.lock(NAME.text).states == ()


@pytest.mark.invariant("stale-page-hits-no-successor")
class TestStalePages:
    """Every form names what its page showed. If another one is there now, nothing happens."""

    def test_release_of_an_ended_holder_frees_no_successor(self, store: RedisStore, web: TestClient) -> None:
        take(store, "x.1", request_of("x"))
        form = form_on(web, LOCK, "release")
        store.release(NAME, "x.1", ReleaseRequest())
        take(store, "y.1", request_of("y"))
        answer = send(web, form, force="yes")
        assert (answer.status_code, "another acquisition holds it now" in answer.text) == (409, True)
        assert store.inspect(NAME)

    def test_end_of_a_hold_ends_no_later_hold(self, web: TestClient, control: LockControl) -> None:
        control.hold(NAME.text, 60, "first")
        form = form_on(web, LOCK, "unhold")
        control.unhold(NAME.text)
        control.hold(NAME.text, 60, "second")
        assert send(web, form).status_code == 409
        assert control.lock(NAME.text).states == ("kept",)

    def test_end_of_a_pending_hold_ends_no_later_hold_of_another_operator(
        self, store: RedisStore, web: TestClient, control: LockControl, app: Celery
    ) -> None:
        take(store, "x.1", request_of("x"))
        control.hold(NAME.text, 60, "first")
        form = form_on(web, LOCK, "unhold")
        control.unhold(NAME.text)
        LockControl(app, "grace").hold(NAME.text, 60, "second")
        assert send(web, form).status_code == 409
        store.release(NAME, "x.1", ReleaseRequest())
        holder = control.lock(NAME.text).holder
        assert holder is not None
        assert (holder.kept_by, holder.reason) == ("operator", "second")

    def test_later_run_of_unknown_outcome_is_not_settled(
        self, store: RedisStore, web: TestClient, control: LockControl
    ) -> None:
        die(store, "x")
        form = form_on(web, "/unknown", "resolve", sent="yes")
        control.resolve(NAME.text, sent=False)
        take(store, "y.1", request_of("y", once=True))
        store.release(NAME, "y.1", ReleaseRequest(outcome_unknown=True))
        assert send(web, form).status_code == 409
        assert len(control.unknown_outcomes().items) == 1

    def test_later_run_mark_and_claim_are_not_deleted(
        self, store: RedisStore, web: TestClient, control: LockControl
    ) -> None:
        use(store, "x")
        claim(store, "x")
        forms = form_on(web, LOCK, "forget"), form_on(web, LOCK, "drop_claim")
        control.forget(NAME.text)
        control.drop_claim(NAME.text)
        take(store, "y.1", request_of("y", once=True))
        store.release(NAME, "y.1", ReleaseRequest(outcome_unknown=True))
        assert [send(web, form).status_code for form in forms] == [409, 409]
        assert control.lock(NAME.text).states == ("unknown",)


@pytest.mark.invariant("forged-requests-change-nothing")
class TestForgedRequests:
    """A change needs a POST from this site, with the cookie and its token."""

    @pytest.mark.parametrize(
        "origin",
        ["http://evil.example", "http://localhost.evil.example", "http://localhost:81", "http://[::1", "null", None],
    )
    def test_other_origin_changes_nothing(self, store: RedisStore, web: TestClient, origin: str | None) -> None:
        take(store, "x.1", request_of("x"))
        answer = send(web, form_on(web, LOCK, "release"), origin, force="yes")
        assert (answer.status_code, "Nothing was changed" in answer.text) == (403, True)
        assert store.inspect(NAME)

    @pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
    def test_other_site_changes_nothing(self, store: RedisStore, web: TestClient, site: str) -> None:
        take(store, "x.1", request_of("x"))
        path, fields = form_on(web, LOCK, "release")
        headers = {"origin": SITE, "sec-fetch-site": site}
        assert web.post(path, data={**fields, "force": "yes"}, headers=headers).status_code == 403
        assert store.inspect(NAME)

    @pytest.mark.parametrize("token", ["", "x", "a" * 43, "ä"])
    def test_wrong_token_changes_nothing(self, store: RedisStore, web: TestClient, token: str) -> None:
        take(store, "x.1", request_of("x"))
        assert send(web, form_on(web, LOCK, "release"), force="yes", csrf=token).status_code == 403
        assert store.inspect(NAME)

    def test_missing_cookie_changes_nothing(self, store: RedisStore, web: TestClient) -> None:
        take(store, "x.1", request_of("x"))
        form = form_on(web, LOCK, "release")
        web.cookies.clear()
        assert send(web, form, force="yes").status_code == 403
        assert send(web, form, force="yes", csrf="").status_code == 403
        assert store.inspect(NAME)

    def test_get_and_json_change_nothing(self, store: RedisStore, web: TestClient) -> None:
        take(store, "x.1", request_of("x"))
        path, fields = form_on(web, LOCK, "release")
        assert web.get(path, params={**fields, "force": "yes"}).status_code == 405
        headers = {"origin": SITE}
        assert web.post(path, json={**fields, "force": "yes"}, headers=headers).status_code == 400
        assert web.post(path, params={**fields, "force": "yes"}, headers=headers).status_code == 400
        assert store.inspect(NAME)

    def test_cookie_is_strict_and_hidden_from_scripts(self, web: TestClient) -> None:
        cookie = web.get("/").headers["set-cookie"].lower()
        assert "samesite=strict" in cookie
        assert "httponly" in cookie


@pytest.mark.invariant("dashboard-access-is-asked")
class TestAccess:
    def test_default_reads_and_shows_no_form(self, app: Celery, store: RedisStore) -> None:
        take(store, "x.1", request_of("x"))
        client = TestClient(dashboard(app), base_url=SITE)
        page = client.get(LOCK)
        assert (page.status_code, forms_on(page.text), "set-cookie" in page.headers) == (200, [], False)
        assert (
            send(client, ("/do/release", {"name": NAME.text, "acquisition": "x.1", "force": "yes"})).status_code == 403
        )
        assert store.inspect(NAME)

    @pytest.mark.parametrize("path", ["/", LOCK, "/api/v1/locks", "/metrics", "/do/release", "/unknown", "/audit"])
    def test_none_sees_nothing(self, app: Celery, path: str) -> None:
        client = client_of(app, "none")
        answer = client.post(path) if "/do/" in path else client.get(path)
        assert answer.status_code == 403
        assert client.get("/healthz").text == "ok\n"

    def test_set_of_actions_permits_these_only(self, app: Celery, store: RedisStore) -> None:
        die(store, "x")
        bury(store, "b")
        client = client_of(app, {"resolve"})
        paths = {path for page in ("/unknown", "/dead", LOCK) for path, _ in forms_on(client.get(page).text)}
        assert paths == {"/do/resolve"}
        token = form_on(client, "/unknown", "resolve")[1]["csrf"]
        for verb in ACTIONS - {"resolve"}:
            assert send(client, (f"/do/{verb}", {"csrf": token, "name": NAME.text})).status_code == 403
        assert send(client, form_on(client, "/unknown", "resolve")).status_code == 303

    def test_functions_may_be_coroutines_that_ask_the_request(self, app: Celery) -> None:
        async def access(request: Request) -> str:
            return "act" if request.headers.get("x-role") == "operator" else "none"

        async def user(request: Request) -> str:
            return f"{request.headers['x-role']}\nfrom afar"

        client = TestClient(dashboard(app, access=access, user=user), base_url=SITE)
        assert client.get("/").status_code == 403
        assert "User: operator from afar" in client.get("/", headers={"x-role": "operator"}).text

    @pytest.mark.parametrize("given", ["write", None, {"release", "all"}, 3])
    def test_other_rights_are_an_error_and_permit_nothing(self, app: Celery, given: Any) -> None:
        answer = client_of(app, given).get("/locks")
        assert (answer.status_code, "expected" in answer.text) == (500, True)
