"""``LockAdminMixin``: the lock of an object on the object's own page."""

from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps

from celery_dlock.store.redis.store import RedisStore
from tests.contract.test_control_reads import hold, name

Login = Callable[..., Any]
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
    facts = [("Name", name("g").text), ("State", "free"), ("Waiters", "0"), ("Next call", "runs")]
    assert client.get(page(group)).context_data["dlock"] == {"facts": facts, "url": ""}
    hold(store, "g")
    text = client.get(page(group)).content.decode()
    assert "[g] on node1 (process" in text
    assert "in the dashboard" not in text
    assert "auth/group" in text


def test_page_links_to_the_lock_in_the_dashboard(login: Login, group: Any) -> None:
    client = login(*SEE, "view_lock")
    link = client.get(page(group)).context_data["dlock"]["url"]
    assert link.startswith("/locks/lock?name=")
    assert name("g").text in client.get(link).content.decode()


def test_object_without_a_lock_and_a_new_object_show_none(login: Login, group: Any) -> None:
    group.name = "without a lock"
    group.save()
    client = login(*SEE, "add_group")
    assert client.get(page(group)).context_data["dlock"] == {}
    assert client.get("/admin/auth/group/add/").status_code == 200


def test_absent_store_does_not_break_the_objects_page(login: Login, app: Any, group: Any) -> None:
    app.conf.dlock_url = "redis://127.0.0.1:1/0"
    response = login(*SEE).get(page(group))
    assert response.status_code == 200
    assert "the lock store did not answer" in response.content.decode()
    assert "_save" in response.content.decode()
