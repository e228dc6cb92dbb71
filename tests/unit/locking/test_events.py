"""Events and their listeners, and the signals made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from celery import Celery
from typing_extensions import Self

from celery_dlock import signals
from celery_dlock.locking.events import Event, Kind, Listeners
from celery_dlock.signals import feed

KINDS: tuple[Kind, ...] = get_args(Kind)
FACTS: dict[str, Any] = {
    "name": "x:1",
    "owner": "me",
    "task": "app.post",
    "task_id": "id",
    "token": 7,
    "reason": "because",
}


def test_every_listener_is_told_the_same_event_in_order() -> None:
    told: list[tuple[str, Event]] = []
    listeners = Listeners()
    listeners.add(lambda event: told.append(("first", event)))
    listeners.add(lambda event: told.append(("second", event)))
    listeners.emit("acquired", **FACTS)
    event = Event(kind="acquired", **FACTS)
    assert told == [("first", event), ("second", event)]
    assert told[0][1] is told[1][1]


def test_a_listener_that_raises_changes_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []

    def broken(_: Event) -> None:
        raise ZeroDivisionError

    listeners = Listeners()
    listeners.add(broken)
    listeners.add(told.append)
    listeners.add(broken)
    listeners.emit("lost", **FACTS)
    assert [event.kind for event in told] == ["lost"]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "a listener of dlock-lost failed")
    ] * 2
    assert "ZeroDivisionError" in caplog.text


def test_a_listener_is_told_only_what_it_hears_at_that_moment() -> None:
    told: list[Kind] = []
    heard: set[Kind] = {"lost"}
    listeners = Listeners()
    listeners.add(lambda event: told.append(event.kind), hears=heard.__contains__)
    for kind in KINDS:
        listeners.emit(kind, **FACTS)
    heard.add("acquired")
    listeners.emit("acquired", **FACTS)
    assert told == ["lost", "acquired"]


def test_an_event_that_nobody_hears_is_never_made() -> None:
    listeners = Listeners()
    listeners.add(lambda event: None, hears=lambda kind: False)
    listeners.emit("acquired", nonsense=1)  # no event has such a field


def test_an_event_cannot_be_changed_by_a_listener() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Event(kind="lost", **FACTS).name = "y"  # type: ignore[misc]


# Signals


@pytest.fixture
def fed() -> Iterator[tuple[Celery, Listeners]]:
    app = Celery("a", broker="memory://", set_as_current=False)

    @app.task(name="app.post", shared=False)
    def post() -> None: ...

    app.finalize()
    listeners = Listeners()
    feed(listeners, app, lambda kind: None)
    yield app, listeners
    for name in signals.__all__:
        if name.startswith("lock_"):
            getattr(signals, name).receivers = []


def test_every_kind_of_event_has_a_signal_of_its_name() -> None:
    assert set(signals.__all__) == {"feed"} | {f"lock_{kind}" for kind in KINDS}


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_gets_the_task_and_the_event(fed: tuple[Celery, Listeners], kind: Kind) -> None:
    app, listeners = fed
    received: list[tuple[object, Event]] = []

    def receive(sender: object, event: Event, **_: object) -> None:
        received.append((sender, event))

    getattr(signals, f"lock_{kind}").connect(receive)
    for other in KINDS:
        listeners.emit(other, **FACTS)
    assert received == [(app.tasks["app.post"], Event(kind=kind, **FACTS))]
    listeners.emit(kind, name="x:1", owner="me")
    assert received[1] == (None, Event(kind=kind, name="x:1", owner="me"))


def test_a_receiver_that_raises_changes_nothing(fed: tuple[Celery, Listeners]) -> None:
    _, listeners = fed
    received: list[Event] = []

    def broken(**_: object) -> None:
        raise ZeroDivisionError

    def receive(event: Event, **_: object) -> None:
        received.append(event)

    signals.lock_acquired.connect(broken)
    signals.lock_acquired.connect(receive)
    listeners.emit("acquired", **FACTS)
    assert len(received) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_monitor_event_is_sent_though_a_receiver_ends_the_thread(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, fed: tuple[Celery, Listeners]
) -> None:
    app, _ = fed
    listeners, sent = Listeners(), a_monitor(app, monkeypatch)
    feed(listeners, app, lambda kind: "node1")

    def end(**_: object) -> None:
        raise SystemExit

    getattr(signals, f"lock_{kind}").connect(end)
    with pytest.raises(SystemExit):
        listeners.emit(kind, **FACTS)
    facts = {"name": "x:1", "owner": "me", "token": 7, "reason": "because"}
    assert sent == [(f"dlock-{kind}", {"uuid": "id", **facts, **({"local": False} if kind == "bypassed" else {})})]


def test_receiver_gets_the_event_though_the_broker_takes_no_monitor_event(
    monkeypatch: pytest.MonkeyPatch, fed: tuple[Celery, Listeners]
) -> None:
    app, _ = fed
    listeners, received = Listeners(), list[Event]()
    a_monitor(app, monkeypatch, error=ConnectionError("gone"))
    feed(listeners, app, lambda kind: "node1")

    def receive(event: Event, **_: object) -> None:
        received.append(event)

    signals.lock_lost.connect(receive)
    listeners.emit("lost", **FACTS)
    assert received == [Event(kind="lost", **FACTS)]


def a_monitor(
    app: Celery, monkeypatch: pytest.MonkeyPatch, *, error: Exception | None = None
) -> list[tuple[str, dict[str, object]]]:
    """Return the list of the monitor events of an app; with an error, the broker takes none."""
    sent: list[tuple[str, dict[str, object]]] = []

    class Dispatcher:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def send(self, kind: str, **fields: object) -> None:
            if error:
                raise error
            sent.append((kind, fields))

    monkeypatch.setattr(app.events, "default_dispatcher", lambda hostname: Dispatcher())
    return sent
