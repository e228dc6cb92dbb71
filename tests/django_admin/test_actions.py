"""The actions of Django's admin: by permission and POST, recorded, and on no later acquisition than the shown one."""

from typing import Any

import pytest

from celery_dlock.control import LockControl
from celery_dlock.django.operations import Target
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import request_of, take
from tests.contract.test_control_reads import bury, die, grant, hold, name
from tests.django_admin.helpers import Login, act, log, page_of, targets

HELD, DEAD = page_of("heldlock"), page_of("deadletter")
UNKNOWN, WAITING = page_of("unknownoutcome"), page_of("waitingcall")


def holder(control: LockControl, text: str) -> Any:
    return control.lock(name(text).text).holder


def test_release_needs_force_while_the_holder_is_alive(store: RedisStore, login: Login, control: LockControl) -> None:
    hold(store, "h")
    client = login("view_heldlock", "release_heldlock")
    selected = targets(client.get(HELD))
    assert "its holder is alive" in act(client, HELD, "release", selected)
    assert holder(control, "h") is not None
    assert log() == []
    assert "Release: 1 done" in act(client, HELD, "release", selected, force="on")
    assert holder(control, "h") is None


@pytest.mark.invariant("admin-actions-are-permitted")
def test_action_is_recorded_by_django_and_in_the_store(store: RedisStore, login: Login, control: LockControl) -> None:
    hold(store, "h")
    client = login("view_heldlock", "release_heldlock")
    act(client, HELD, "release", targets(client.get(HELD)), force="on", reason="host is gone")
    assert log() == [("alice", name("h").text, "Released by force. Reason: host is gone")]
    record = control.audit()[0]
    assert (record.action, record.name, record.user, record.reason) == (
        "release", name("h").text, "alice", "host is gone",
    )  # fmt: skip
    history = client.get(f"{HELD}{name('h').text}/history/").content.decode()
    assert "Released by force. Reason: host is gone" in history


@pytest.mark.invariant("operators-free-no-successor")
def test_stale_release_does_not_free_the_next_holder(store: RedisStore, login: Login, control: LockControl) -> None:
    hold(store, "h")
    client = login("view_heldlock", "release_heldlock")
    shown = targets(client.get(HELD))
    store.release(name("h"), "h.1", ReleaseRequest())
    take(store, "next.1", request_of("next"), name=name("h"))
    assert "another acquisition holds it now" in act(client, HELD, "release", shown, force="on")
    assert holder(control, "h").acquisition == "next.1"


def test_hold_and_unhold_show_operator_and_reason(store: RedisStore, login: Login, control: LockControl) -> None:
    hold(store, "h")
    client = login("view_heldlock", "hold_heldlock")
    act(client, HELD, "hold", targets(client.get(HELD)), minutes="10", reason="gateway is down")
    store.release(name("h"), "h.1", ReleaseRequest())
    held = holder(control, "h")
    assert held.operator.startswith("alice@")
    assert (held.kept_by, held.reason) == ("operator", "gateway is down")
    act(client, HELD, "unhold", targets(client.get(HELD)))
    assert holder(control, "h") is None
    texts = [text for _, _, text in log()]
    assert texts[0].startswith("Held for 10 min, from the release of its present holder")
    assert texts[1].startswith("Ended the hold")


def test_hold_without_a_reason_asks_again(store: RedisStore, login: Login, control: LockControl) -> None:
    hold(store, "h")
    client = login("view_heldlock", "hold_heldlock")
    asked = {"action": "hold", "_selected_action": targets(client.get(HELD)), "confirmed": "yes", "minutes": "0"}
    response = client.post(HELD, asked)
    assert set(response.context_data["form"].errors) == {"minutes", "reason"}
    assert holder(control, "h").operator == ""


@pytest.mark.invariant("operators-free-no-successor")
def test_stale_unhold_does_not_end_the_next_hold(login: Login, control: LockControl) -> None:
    control.hold(name("h").text, 60, "first")
    client = login("view_heldlock", "hold_heldlock")
    shown = targets(client.get(HELD))
    control.unhold(name("h").text)
    control.hold(name("h").text, 60, "second")
    assert "it has changed" in act(client, HELD, "unhold", shown)
    assert holder(control, "h").reason == "second"


@pytest.mark.invariant("operators-free-no-successor")
def test_stale_unhold_does_not_cancel_a_later_hold_that_waits(
    store: RedisStore, login: Login, control: LockControl
) -> None:
    hold(store, "h")
    control.hold(name("h").text, 60, "first")
    client = login("view_heldlock", "hold_heldlock")
    shown = targets(client.get(HELD))
    control.unhold(name("h").text)
    control.hold(name("h").text, 60, "second")
    assert "it has changed" in act(client, HELD, "unhold", shown)
    assert holder(control, "h").reason == "second"


@pytest.mark.parametrize(("action", "state"), [("sent", "used"), ("not_sent", None)])
def test_unknown_outcome_is_resolved(
    store: RedisStore, login: Login, control: LockControl, action: str, state: str | None
) -> None:
    die(store, "d")
    client = login("view_unknownoutcome", "resolve_unknownoutcome")
    act(client, UNKNOWN, action, targets(client.get(UNKNOWN)))
    run = control.lock(name("d").text).run
    assert control.unknown_outcomes() == ()
    assert (run.state if run and run.state == "used" else None) == state
    assert log()[0][:2] == ("alice", name("d").text)


@pytest.mark.invariant("operators-free-no-successor")
def test_stale_resolve_does_not_settle_the_next_run(store: RedisStore, login: Login, control: LockControl) -> None:
    die(store, "d")
    client = login("view_unknownoutcome", "resolve_unknownoutcome")
    shown = targets(client.get(UNKNOWN))
    control.resolve(name("d").text, sent=False)
    take(store, "later.1", request_of("later", once=True), name=name("d"))
    store.release(name("d"), "later.1", ReleaseRequest(outcome_unknown=True))
    assert "it has changed" in act(client, UNKNOWN, "sent", shown)
    assert [run.task_id for run in control.unknown_outcomes()] == ["later"]


def test_dead_letter_is_requeued(store: RedisStore, login: Login, control: LockControl) -> None:
    bury(store, "b")
    client = login("view_deadletter", "requeue_deadletter")
    selected = targets(client.get(DEAD))
    act(client, DEAD, "requeue", selected)
    assert control.dead_letters() == ()
    assert [one.task_id for one in control.waiting(name("b").text)] == ["b"]
    assert log() == [("alice", name("b").text, f"Requeued the message {control.waiting()[0].identity}. Reason: why")]
    gone = Target(name("b").text, "0" * 32).text
    assert "it has changed" in act(client, DEAD, "requeue", [gone])


@pytest.mark.parametrize(("page", "action"), [(DEAD, "drop"), (WAITING, "drop")])
def test_message_of_an_unknown_task_is_not_said_to_be_dropped(
    store: RedisStore, login: Login, page: str, action: str
) -> None:
    grant(store, "g", "w")
    bury(store, "b")
    client = login("view_deadletter", "drop_deadletter", "view_waitingcall", "drop_waitingcall")
    text = act(client, page, action, targets(client.get(page))[-1:])
    assert "its end could not be stored" in text
    assert log() == []


ALL = {
    HELD: ["release", "hold", "unhold"],
    WAITING: ["drop"],
    UNKNOWN: ["sent", "not_sent"],
    DEAD: ["requeue", "drop"],
}
VIEW = ["view_heldlock", "view_waitingcall", "view_unknownoutcome", "view_deadletter"]


@pytest.mark.invariant("admin-actions-are-permitted")
def test_action_without_its_permission_is_not_offered_and_is_refused(
    store: RedisStore, login: Login, control: LockControl
) -> None:
    hold(store, "h")
    grant(store, "g", "w")
    die(store, "d")
    bury(store, "b")
    client = login(*VIEW)
    selected = '["x", "y", ""]'
    for page, actions in ALL.items():
        response = client.get(page)
        assert response.context_data["rows"]
        assert '<select name="action"' not in response.content.decode()
        for action in actions:
            refused = client.post(page, {"action": action, "_selected_action": selected, "confirmed": "yes"})
            assert refused.status_code == 403
    assert control.audit() == []


@pytest.mark.invariant("admin-actions-are-permitted")
def test_post_without_djangos_csrf_token_is_refused(store: RedisStore, login: Login, control: LockControl) -> None:
    hold(store, "h")
    client = login("view_heldlock", "release_heldlock", csrf=True)
    asked = {
        "action": "release", "_selected_action": targets(client.get(HELD)), "confirmed": "yes", "force": "on",
    }  # fmt: skip
    assert client.post(HELD, asked).status_code == 403
    assert holder(control, "h") is not None
    token = client.cookies["csrftoken"].value
    assert client.post(HELD, {**asked, "csrfmiddlewaretoken": token}).status_code == 302
    assert holder(control, "h") is None


def test_get_with_the_fields_of_an_action_changes_nothing(
    store: RedisStore, login: Login, control: LockControl
) -> None:
    hold(store, "h")
    client = login("view_heldlock", "release_heldlock")
    asked = {"action": "release", "_selected_action": targets(client.get(HELD)), "confirmed": "yes", "force": "on"}
    assert client.get(HELD, asked).status_code == 200
    assert holder(control, "h") is not None


@pytest.mark.parametrize(
    "selected", ["", "x", "[]", "[1, 2, 3]", '{"a": 1}', '["a", "b"]', "[" * 50_000, '["\\ud800", "a", ""]'],
    ids=["empty", "word", "list", "numbers", "mapping", "two", "deep", "surrogate"],
)  # fmt: skip
def test_malformed_selection_changes_nothing(login: Login, selected: str, control: LockControl) -> None:
    client = login("view_heldlock", "release_heldlock")
    response = client.post(
        HELD, {"action": "release", "_selected_action": selected, "confirmed": "yes", "force": "on"}, follow=True
    )
    assert "Nothing was changed" in response.content.decode()
    assert control.audit() == []


def test_buttons_of_a_lock_are_those_that_its_state_allows(
    store: RedisStore, login: Login, control: LockControl
) -> None:
    die(store, "d")
    control.hold(name("h").text, 60, "why")
    client = login(*VIEW, "release_heldlock", "hold_heldlock", "resolve_unknownoutcome")

    def buttons(text: str) -> list[str]:
        response = client.get(f"{HELD}{name(text).text}/change/")
        return [button["action"] for button in response.context_data["buttons"]]

    assert buttons("free") == ["hold"]
    assert buttons("h") == ["hold", "release", "unhold"]
    assert buttons("d") == ["hold", "sent", "not_sent"]
