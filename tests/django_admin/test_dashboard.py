"""The dashboard inside a Django project: its rights are those of Django's user, under WSGI and under ASGI."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.contrib import admin
from django.test import AsyncClient, Client, override_settings
from django.urls import path

from celery_dlock.control import LockControl
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.web import ACTIONS
from tests.contract.test_control_reads import hold, name
from tests.contract.web_helpers import forms_on

Login = Callable[..., Any]
ORIGIN = {"origin": "http://testserver"}


def page_of(text: str) -> str:
    return f"/locks/lock?name={name(text).text}"


def release(client: Any, text: str, wait: Callable[[Any], Any] = lambda method: method, **headers: str) -> Any:
    """Send the form that releases a lock, as a browser that has read the page of the lock."""
    page = wait(client.get)(page_of(text)).content.decode()
    fields = next(fields for action, fields in forms_on(page) if action.endswith("release"))
    body = urlencode({**fields, "force": "yes"})
    return wait(client.post)(
        "/locks/do/release", body, content_type="application/x-www-form-urlencoded", headers={**ORIGIN, **headers}
    )


def test_staff_with_the_permission_to_view_reads_the_dashboard(store: RedisStore, login: Login) -> None:
    hold(store, "h")
    client = login("view_lock")
    overview = client.get("/locks/")
    assert (overview.status_code, overview["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "frame-ancestors 'none'" in overview["Content-Security-Policy"]
    assert name("h").text in client.get("/locks/locks").content.decode()
    assert client.get("/locks/static/dashboard.css")["Content-Type"].startswith("text/css")
    assert client.get("/locks/api/v1/locks").json()["items"][0]["name"] == name("h").text
    assert 'href="/locks/waiting"' in overview.content.decode()
    assert overview.content.decode().count("<svg") == 4


@pytest.mark.parametrize("page", ["", "locks", "api/v1/locks", "metrics", "healthz", "static/dashboard.css"])
def test_visitor_who_is_not_staff_is_sent_to_the_login(login: Login, page: str) -> None:
    member = login("view_lock")
    apps.get_model("auth.User").objects.update(is_staff=False)
    for client in (member, Client()):
        response = client.get(f"/locks/{page}")
        assert (response.status_code, response.url) == (302, f"/admin/login/?next=/locks/{page}")


def test_staff_without_the_permission_to_view_is_refused(login: Login) -> None:
    assert login("release_lock").get("/locks/").status_code == 403


def test_each_action_of_the_dashboard_has_a_permission_that_exists() -> None:
    known = apps.get_model("auth.Permission").objects.filter(content_type__app_label="celery_dlock")
    assert {one.codename for one in known} == {"view_lock", *(f"{action}_lock" for action in ACTIONS)}


@pytest.mark.invariant("admin-actions-are-permitted")
@pytest.mark.parametrize("action", sorted(ACTIONS))
def test_permission_permits_its_own_action_and_no_other(login: Login, control: LockControl, action: str) -> None:
    client = login("view_lock", f"{action}_lock")
    answers = {other: client.post(f"/locks/do/{other}", {}, headers=ORIGIN).content.decode() for other in ACTIONS}
    assert {other for other, text in answers.items() if "You may not do this" not in text} == {action}
    assert control.audit() == []


@pytest.mark.invariant("admin-actions-are-permitted")
def test_action_needs_its_permission_and_names_djangos_user(
    store: RedisStore, login: Login, control: LockControl
) -> None:
    hold(store, "h")
    client = login("view_lock", "hold_lock")
    page = client.get(page_of("h")).content.decode()
    assert [action for action, _ in forms_on(page)] == ["/locks/do/hold"]
    assert client.post("/locks/do/release", {}, headers=ORIGIN).status_code == 403
    permission = apps.get_model("auth.Permission").objects.get(codename="release_lock")
    apps.get_model("auth.User").objects.get().user_permissions.add(permission)
    response = release(client, "h")
    assert (response.status_code, response["Location"]) == (303, f"{page_of('h').replace(':', '%3A')}&done=release")
    assert control.lock(name("h").text).holder is None
    assert (control.audit()[0].action, control.audit()[0].user) == ("release", "alice")


@pytest.mark.parametrize("headers", [{"origin": "http://other"}, {"cookie": ""}])
def test_forged_post_is_refused_by_the_dashboard(
    store: RedisStore, login: Login, control: LockControl, headers: dict[str, str]
) -> None:
    hold(store, "h")
    client = login("view_lock", "release_lock")
    session = f"sessionid={client.cookies['sessionid'].value}"
    headers = {key: value or session for key, value in headers.items()}
    assert release(client, "h", **headers).status_code == 403
    assert control.lock(name("h").text).holder is not None


def test_token_cookie_keeps_its_attributes(store: RedisStore, login: Login) -> None:
    hold(store, "h")
    client = login("view_lock", "release_lock")
    client.get(page_of("h"))
    cookie = client.cookies["dlock_csrf"]
    assert (cookie["path"], cookie["samesite"], cookie["httponly"]) == ("/locks", "strict", True)


@pytest.mark.parametrize(("permissions", "shown"), [(["view_lock"], True), (["release_lock"], False)])
def test_index_of_the_admin_links_to_the_dashboard_for_those_who_may_see_it(
    login: Login, permissions: list[str], shown: bool
) -> None:
    client = login(*permissions)
    assert ('href="/admin/celery_dlock/lock/"' in client.get("/admin/").content.decode()) == shown
    response = client.get("/admin/celery_dlock/lock/")
    assert (response.status_code, response.get("Location")) == ((302, "/locks/") if shown else (403, None))


def test_index_of_the_admin_says_how_to_mount_the_dashboard(login: Login) -> None:
    with override_settings(ROOT_URLCONF=(path("admin/", admin.site.urls),)):
        response = login("view_lock").get("/admin/celery_dlock/lock/", follow=True)
    assert "The dashboard is not mounted" in response.content.decode()


def test_host_that_django_refuses_does_not_reach_the_dashboard(login: Login) -> None:
    assert login("view_lock").get("/locks/", HTTP_HOST="other").status_code == 400


def test_settings_without_a_store_are_reported(login: Login, app: Any) -> None:
    app.conf.dlock_url = None
    response = login("view_lock").get("/locks/")
    assert response.status_code == 503
    assert "dlock_url is not set" in response.content.decode()


def under_asgi(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of an `AsyncClient` as one that waits for its response."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        return await method(*args, **kwargs)

    return async_to_sync(call)


def test_dashboard_reads_and_acts_under_asgi(store: RedisStore, login: Login, control: LockControl) -> None:
    hold(store, "h")
    client = AsyncClient()
    client.cookies = login("view_lock", "release_lock").cookies
    response = release(client, "h", wait=under_asgi)
    assert response.status_code == 303
    assert control.lock(name("h").text).holder is None
    assert control.audit()[0].user == "alice"
