"""``LockAdminMixin``: the lock of an object on the object's own page."""

from typing import Any

import pytest
from django.apps import apps

from celery_dlock.control import LockControl
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import request_of, take
from tests.contract.test_control_reads import hold, name
from tests.django_admin.helpers import Login, log

SEE = ("view_group", "change_group")


@pytest.fixture
def group() -> Any:
    made = apps.get_model("auth.Group").objects.create(name="g")
    yield made
    apps.get_model("auth.Group").objects.all().delete()


def page(group: Any) -> str:
    return f"/admin/auth/group/{group.pk}/change/"


def test_page_shows_the_holder_of_the_objects_lock(store: RedisStore, login: Login, group: Any) -> None:
    client = login(*SEE)
    assert client.get(page(group)).context_data["dlock"] == {"name": name("g").text, "holder": None, "state": "free"}
    hold(store, "g")
    response = client.get(page(group))
    assert "held since" in response.content.decode()
    assert "node1 g" in response.content.decode()
    assert "Release the lock" not in response.content.decode()
    assert "auth/group" in response.content.decode()


def test_object_without_a_lock_and_a_new_object_show_none(login: Login, group: Any) -> None:
    group.name = "without a lock"
    group.save()
    client = login(*SEE, "add_group")
    assert client.get(page(group)).context_data["dlock"] == {}
    assert client.get("/admin/auth/group/add/").status_code == 200


def test_lock_of_the_object_is_released_by_permission(
    store: RedisStore, login: Login, control: LockControl, group: Any
) -> None:
    hold(store, "g")
    client = login(*SEE, "release_heldlock")
    link = client.get(page(group)).context_data["dlock"]["release"]
    assert f'href="{page(group)}" class="button cancel-link"' in client.get(link).content.decode()
    assert control.lock(name("g").text).holder is not None
    response = client.post(link, {"force": "on", "reason": "why"}, follow=True)
    assert response.redirect_chain == [(page(group), 302)]
    assert control.lock(name("g").text).holder is None
    assert log() == [("alice", str(group.pk), f"Lock {name('g').text}: Released by force.")]
    assert control.audit()[0].user == "alice"


def test_release_without_the_permission_is_refused(
    store: RedisStore, login: Login, control: LockControl, group: Any
) -> None:
    hold(store, "g")
    link = f"/admin/auth/group/{group.pk}/release-lock/?acquisition=g.1"
    client = login(*SEE)
    assert client.post(link, {"force": "on"}).status_code == 403
    assert control.lock(name("g").text).holder is not None


def test_release_needs_the_right_to_see_the_object(store: RedisStore, login: Login, group: Any) -> None:
    hold(store, "g")
    link = f"/admin/auth/group/{group.pk}/release-lock/?acquisition=g.1"
    assert login("release_heldlock").post(link, {"force": "on"}).status_code == 403


@pytest.mark.invariant("operators-free-no-successor")
def test_stale_link_does_not_free_the_next_holder(
    store: RedisStore, login: Login, control: LockControl, group: Any
) -> None:
    hold(store, "g")
    client = login(*SEE, "release_heldlock")
    link = client.get(page(group)).context_data["dlock"]["release"]
    store.release(name("g"), "g.1", ReleaseRequest())
    take(store, "next.1", request_of("next"), name=name("g"))
    response = client.post(link, {"force": "on"}, follow=True)
    assert "another acquisition holds it now" in response.content.decode()
    assert control.lock(name("g").text).holder is not None


def test_absent_store_does_not_break_the_objects_page(login: Login, app: Any, group: Any) -> None:
    app.conf.dlock_url = "redis://127.0.0.1:1/0"
    response = login(*SEE).get(page(group))
    assert response.status_code == 200
    assert "the lock store did not answer" in response.content.decode()
    assert "_save" in response.content.decode()
