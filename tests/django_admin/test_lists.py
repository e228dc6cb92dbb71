"""The lists of Django's admin show the states of the store, to the users who may see them."""

from html import escape
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection
from django.test import Client

from celery_dlock.store.redis.store import RedisStore
from tests.contract.test_control_reads import bury, die, grant, hold, name, use
from tests.django_admin.helpers import Login, page_of

VIEWS = {
    "heldlock": "view_heldlock",
    "waitingcall": "view_waitingcall",
    "unknownoutcome": "view_unknownoutcome",
    "deadletter": "view_deadletter",
}


def names(response: Any) -> list[str]:
    """Return the lock names of a list."""
    assert response.status_code == 200
    found = [row["name"] for row in response.context_data["rows"]]
    assert all(f">{escape(one)}</a>" in response.content.decode() for one in found)
    return found


@pytest.mark.invariant("operators-see-each-state")
def test_each_list_shows_the_names_in_its_state(store: RedisStore, login: Login) -> None:
    hold(store, "h")
    use(store, "u")
    grant(store, "g", "w")
    die(store, "d")
    bury(store, "b")
    client = login(*VIEWS.values())
    found = {model: sorted(names(client.get(page_of(model)))) for model in VIEWS}
    assert found == {
        "heldlock": sorted(name(text).text for text in ("h", "g", "b")),
        "waitingcall": [name("g").text] * 2,
        "unknownoutcome": [name("d").text],
        "deadletter": [name("b").text],
    }


@pytest.mark.parametrize("model", VIEWS)
def test_list_without_its_permission_is_refused(login: Login, model: str) -> None:
    client = login(*(permission for one, permission in VIEWS.items() if one != model))
    assert client.get(page_of(model)).status_code == 403
    assert client.get(f"{page_of(model)}x/change/").status_code == 403


def test_visitor_who_is_not_staff_is_sent_to_the_login(login: Login) -> None:
    login("view_heldlock").logout()
    response = Client().get(page_of("heldlock"))
    assert (response.status_code, response.url) == (302, f"/admin/login/?next={page_of('heldlock')}")


def test_nothing_can_be_added_or_deleted(login: Login) -> None:
    client = login()
    apps.get_model("auth.User").objects.update(is_superuser=True)
    assert client.get(f"{page_of('heldlock')}add/").status_code == 403
    assert client.get(f"{page_of('heldlock')}x/delete/").status_code == 403
    index = client.get("/admin/").content.decode()
    assert page_of("heldlock") in index
    assert f"{page_of('heldlock')}add/" not in index


def test_pages_of_a_long_list_show_each_entry_once(store: RedisStore, login: Login) -> None:
    count = 230
    for number in range(count):
        die(store, f"d{number}")
        hold(store, f"h{number}")
    client = login(*VIEWS.values())
    for model, prefix in (("unknownoutcome", "d"), ("heldlock", "h")):
        seen, query = list[str](), ""
        while True:
            response = client.get(page_of(model) + query)
            seen += names(response)
            query = response.context_data["next_query"]
            if not query:
                break
        assert sorted(set(seen)) == sorted(name(f"{prefix}{number}").text for number in range(count))
        assert model == "heldlock" or len(seen) == count  # a scan may show an entry twice


def test_filter_by_pattern_and_state_leaves_the_others_out(store: RedisStore, login: Login) -> None:
    hold(store, "shop.1")
    hold(store, "other")
    grant(store, "shop.2")
    client = login(*VIEWS.values())
    page = page_of("heldlock")
    assert sorted(names(client.get(page, {"name": "*shop.*"}))) == sorted([name("shop.1").text, name("shop.2").text])
    assert names(client.get(page, {"name": "*shop.*", "state": "granted"})) == [name("shop.2").text]
    assert names(client.get(page, {"task": "app.other"})) == []
    assert names(client.get(page_of("waitingcall"), {"name": "*shop.2*"})) == [name("shop.2").text]


@pytest.mark.parametrize("model", VIEWS)
def test_malformed_cursor_leads_to_the_first_page(login: Login, model: str) -> None:
    response = login(*VIEWS.values()).get(page_of(model), {"cursor": "x"}, follow=True)
    assert response.redirect_chain == [(page_of(model), 302)]
    assert "no longer there" in response.content.decode()


@pytest.mark.parametrize("model", ["heldlock", "waitingcall", "unknownoutcome", "deadletter"])
def test_malformed_filter_is_ignored(login: Login, model: str) -> None:
    assert login(f"view_{model}").get(page_of(model), {"name": "\0", "state": "open"}).status_code == 200


def test_name_with_markup_is_escaped_on_every_page(store: RedisStore, login: Login) -> None:
    hold(store, "<script>alert(1)</script>\"'")
    client = login(*VIEWS.values(), "release_heldlock", "hold_heldlock")
    page = client.get(page_of("heldlock"))
    selected = {"action": "release", "_selected_action": page.context_data["rows"][0]["target"]}
    pages = [page, client.get(page.context_data["rows"][0]["url"]), client.post(page_of("heldlock"), selected)]
    for response in pages:
        assert response.status_code == 200
        assert "<script>alert" not in response.content.decode()
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in response.content.decode()


def test_page_of_a_lock_shows_holder_and_waiters(store: RedisStore, login: Login) -> None:
    grant(store, "g", "w")
    response = login("view_heldlock").get(f"{page_of('heldlock')}{name('g').text}/change/")
    assert dict(response.context_data["facts"])["States"] == "granted"
    assert [waiter.task_id for waiter, _ in response.context_data["waiters"]] == ["g", "w"]
    assert response.context_data["buttons"] == []


def test_page_of_a_free_lock_and_of_no_lock_name(login: Login) -> None:
    client = login("view_heldlock")
    assert "free" in client.get(f"{page_of('heldlock')}{name('x').text}/change/").content.decode()
    assert client.get(f"{page_of('heldlock')}x%00/change/").status_code in (200, 404)


def test_other_pages_lead_to_the_page_of_the_lock(login: Login) -> None:
    response = login(*VIEWS.values()).get(f"{page_of('deadletter')}a_3Ab/change/")
    assert (response.status_code, response.url) == (302, f"{page_of('heldlock')}a_3Ab/change/")


def test_absent_store_is_reported_with_its_reason(login: Login, app: Any) -> None:
    app.conf.dlock_url = "redis://127.0.0.1:1/0"
    response = login("view_heldlock").get(page_of("heldlock"))
    assert response.status_code == 503
    assert "the lock store did not answer" in response.content.decode()


def test_locks_of_a_redlock_are_reported_as_not_shown(login: Login, app: Any) -> None:
    app.conf.dlock_url = [f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]
    response = login("view_heldlock").get(page_of("heldlock"))
    assert response.status_code == 503
    assert "cannot show the locks of a Redlock as a whole" in response.content.decode()


def test_locks_that_are_switched_off_are_reported(login: Login, app: Any) -> None:
    app.conf.dlock_enabled = False
    response = login("view_heldlock").get(page_of("heldlock"))
    assert response.status_code == 503
    assert "locks are switched off" in response.content.decode()


def test_models_have_permissions_but_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    own = apps.get_model("auth.Permission").objects.filter(content_type__app_label="celery_dlock")
    found = own.values_list("codename", flat=True)
    assert sorted(found) == [
        "drop_claim_heldlock", "drop_deadletter", "drop_waitingcall", "forget_heldlock", "hold_heldlock",
        "release_heldlock", "requeue_deadletter",
        "resolve_unknownoutcome", *sorted(VIEWS.values()),
    ]  # fmt: skip
    assert not [table for table in connection.introspection.table_names() if "dlock" in table]
    call_command("makemigrations", "--check", "--dry-run")
    call_command("dumpdata", "celery_dlock")
    call_command("dumpdata", "celery_dlock", "--all")
    assert "".join(capsys.readouterr().out.split()) == "Nochangesdetected[][]"
