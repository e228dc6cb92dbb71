"""A granted message is published, or becomes a dead letter; none is tried again for ever."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import amqp.serialization
import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.messaging import Producer
from kombu.transport import pyamqp

from celery_dlock.keys.lock_name import shared_name
from celery_dlock.messaging import handoff, results
from celery_dlock.messaging.broker_identity import broker_of
from celery_dlock.messaging.handoff import END_LATER_DELAY, END_LATER_WITHIN, GrantPublisher, end
from celery_dlock.messaging.message import HEADER, RawMessage, RepublishHeader
from celery_dlock.messaging.message_checks import MAX_COUNT
from celery_dlock.messaging.parked import ParkedMessage
from celery_dlock.messaging.wire import WIRE_VERSION
from celery_dlock.store.model import Grant, Identity

NAME = shared_name("n")
APP = Celery("parked", broker="memory://localhost", backend="cache+memory://", set_as_current=False)


@APP.task(name="app.known")
def known() -> None:
    """A task that this process knows: what expires is ended here."""


class Store:
    """Records what becomes of the granted message."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.passed: list[str] = []
        self.attended: set[str] = set()

    def remove_waiter(
        self, name: Any, identity: str, token: str, *, dead_letter: bool = False, ended: bool = False
    ) -> Any:
        self.ends.append("dead letter" if dead_letter else "ended" if ended else "taken out")
        return SimpleNamespace(entry=None, granted=None)

    def confirm_publish(self, name: Any, identity: str, grant_timeout_ms: int) -> None:
        self.ends.append("published")

    def decline_grant(self, name: Any, grant: Grant, *, foreign: bool, present: bool = False) -> None:
        self.passed.append(("foreign, attended" if present else "foreign") if foreign else "own")

    def dead_letters_at(self, name: object) -> str:
        return f"dead:{name}"

    def has_workers(self, broker: str) -> bool:
        return broker in self.attended

    def release_claim(self, *_: Any) -> None:
        """Of no matter here."""


class AMQPChannel:
    """Encodes as py-amqp does, and sends nothing."""

    prepare_message = pyamqp.Channel.prepare_message

    def basic_publish(self, message: Any, exchange: str, routing_key: str, **_: Any) -> None:
        message._serialize_properties()
        amqp.serialization.dumps("Bssbb", (0, exchange, routing_key, False, False))
        assert isinstance(message.body, bytes | str)


class AMQPProducer(Producer):
    """Over that channel."""

    connection: Any = SimpleNamespace(  # type: ignore[assignment]
        transport=SimpleNamespace(driver_name="without confirms"),
        transport_options={},
        ensure=lambda _producer, publish, **_policy: publish,
    )


@contextmanager
def over_amqp() -> Iterator[Producer]:
    producer = AMQPProducer(None)
    producer.channel = AMQPChannel()
    yield producer


@contextmanager
def over_memory() -> Iterator[Producer]:
    with APP.connection_for_write() as connection:
        yield APP.amqp.Producer(connection, auto_declare=False)


OVER = {"amqp": over_amqp, "memory": over_memory}


def carried(entry: str, over: str) -> list[str]:
    store = Store()
    GrantPublisher(APP, store, 60, OVER[over]).publish_next(NAME, Grant("identity", entry, "turn"))  # type: ignore[arg-type]
    return store.ends


def entry(headers: Any = None, properties: Any = None, facts: Any = None) -> str:
    """A message as it would be parked, with these parts changed."""
    broker = broker_of(APP)
    raw = RawMessage(
        "[[], {}, {}]", "application/json", "utf-8", {"task": "app.known", "id": "id1"}, {"priority": 3}, "celery"
    )
    who, _, rest = ParkedMessage.of(tuple(raw), broker, 10**15, 2).text().partition("\n")
    whole = json.loads(rest)
    whole["headers"].update(headers or {})
    whole["properties"].update(properties or {})
    return f"{who}\n{json.dumps({**whole, **(facts or {})})}"


# The forms of `expires`


@pytest.mark.core
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("expires", ["2130", "2130-01-01T00:00:00.000000001Z", "2130-01-01 00:00", None])
def test_parked_message_with_any_expiry_of_celery_is_published(over: str, expires: Any) -> None:
    assert carried(entry(headers={"expires": expires}), over) == ["published"]


@pytest.mark.parametrize("expires", ["2020", "2020-01-01T00:00:00.000000001Z"])
def test_parked_message_that_expired_is_taken_out(expires: str) -> None:
    assert carried(entry(headers={"expires": expires}), "amqp") == ["taken out"]


@pytest.mark.parametrize("expires", ["", "soon", 5, True, {}, [], {"__type__": "datetime", "__value__": "soon"}])
def test_parked_message_with_unreadable_expiry_is_a_dead_letter(expires: Any) -> None:
    assert carried(entry(headers={"expires": expires}), "amqp") == ["dead letter"]


# Whatever else stands in it

numbers = st.integers(-(2**70), 2**70) | st.sampled_from([10**400, 256, -1, 2**31, 2**63])
values = st.recursive(
    st.none()
    | st.booleans()
    | numbers
    | st.floats()
    | st.text()
    | st.sampled_from(["2030", "zlib", "utf-16", "x" * 300]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
        | st.fixed_dictionaries(
            {"__type__": st.sampled_from(["datetime", "date", "time", "decimal", "uuid", "bytes", "base64", "?"])},
            optional={"__value__": inner},
        )
    ),
    max_leaves=6,
)
known_headers = st.sampled_from(
    ["task", "id", "expires", "eta", "compression", "retries", "replaced_task_nesting", "timelimit", "dlock", "any"]
)
known_properties = st.sampled_from(["priority", "delivery_mode", "correlation_id", "reply_to", "any"])
known_facts = st.sampled_from(
    [
        "body",
        "binary",
        "type",
        "encoding",
        "headers",
        "properties",
        "queue",
        "rank",
        "conflict_retries",
        "redelivered",
        "any",
    ]
)
ENDS = (["published"], ["dead letter"], ["taken out"])


@pytest.mark.parametrize("over", OVER)
@given(
    headers=st.dictionaries(known_headers, values, max_size=3),
    properties=st.dictionaries(known_properties, values, max_size=2),
    facts=st.dictionaries(known_facts, values, max_size=2),
)
@example(headers={"any": {"__type__": "decimal", "__value__": "x"}}, properties={}, facts={})  # ArithmeticError
@example(
    headers={"any": {"__type__": "uuid", "__value__": "0" * 31 + "1"}}, properties={}, facts={}
)  # FrameSyntaxError
@example(headers={}, properties={"priority": 256}, facts={})  # struct.error
@example(headers={}, properties={}, facts={"queue": "x" * 300})  # longer than AMQP allows
@example(headers={"any": 2**70}, properties={}, facts={})
@example(headers={"retries": ["1"], "expires": "2020"}, properties={}, facts={})
def test_parked_message_with_any_content_is_published_or_a_dead_letter(
    over: str, headers: dict[str, Any], properties: dict[str, Any], facts: dict[str, Any]
) -> None:
    assert carried(entry(headers=headers, properties=properties, facts=facts), over) in ENDS


@given(st.text() | st.lists(values.map(json.dumps), min_size=2, max_size=2).map("\n".join))
@example("[" * 100_000)
@example('["app.known", "id1"]\n' + '{"a":' * 100_000)
def test_parked_entry_of_any_text_is_a_dead_letter(text: str) -> None:
    assert carried(text, "memory") == ["dead letter"]


# Faults of the broker


@pytest.mark.parametrize(
    "error", [ConnectionResetError("gone"), TimeoutError(), ssl.SSLCertVerificationError("refused"), Exception("odd")]
)
def test_broker_that_fails_leaves_the_message_to_the_next_sweep(error: Exception) -> None:
    @contextmanager
    def failing() -> Iterator[Producer]:
        raise error
        yield

    store = Store()
    GrantPublisher(APP, store, 60, failing).publish_next(NAME, Grant("identity", entry(), "turn"))  # type: ignore[arg-type]
    assert store.ends == []
    assert store.passed == ["own"]


@pytest.mark.core
@pytest.mark.parametrize("tries", [MAX_COUNT - 1, MAX_COUNT, 2**53])
def test_parked_message_with_the_largest_count_of_tries_keeps_its_turn(tries: int) -> None:
    """Without its grant, it would be parked again at its arrival, and its name blocked until the grant ends."""
    told: list[Any] = []

    @contextmanager
    def noting() -> Iterator[Any]:
        with over_memory() as producer:
            yield SimpleNamespace(
                connection=producer.connection, publish=lambda headers, **_: told.append(headers[HEADER])
            )

    identity = Identity("id1").digest
    grant = Grant(identity, entry(facts={"conflict_retries": tries}), "turn")
    GrantPublisher(APP, Store(), 60, noting).publish_next(NAME, grant)  # type: ignore[arg-type]
    assert [RepublishHeader.of(header, Identity("id1"))[1:3] for header in told] == [(MAX_COUNT, "turn")]


def test_connection_that_broke_once_does_not_bury_a_message() -> None:
    """py-amqp raises an AttributeError for some broken connections."""
    opened = []

    @contextmanager
    def breaks_once() -> Iterator[Producer]:
        opened.append(1)
        if len(opened) == 1:
            raise AttributeError("'NoneType' object has no attribute 'sendall'")
        with over_memory() as producer:
            yield producer

    store = Store()
    GrantPublisher(APP, store, 60, breaks_once).publish_next(NAME, Grant("identity", entry(), "turn"))  # type: ignore[arg-type]
    assert (store.ends, len(opened)) == (["published"], 2)


# Messages of another broker


@pytest.mark.invariant("foreign-messages-block-no-name")
def test_message_of_another_broker_is_left_to_it_with_one_warning_a_name(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    handover = GrantPublisher(APP, store, 60, over_memory)  # type: ignore[arg-type]
    foreign = entry(facts={"broker": "amqp://rabbit:5672//"})
    for name in (NAME, NAME, shared_name("m"), NAME):
        handover.publish_next(name, Grant("identity", foreign, "turn"))
    assert (store.ends, store.passed) == ([], 4 * ["foreign"])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split(": ")[0] for text in warnings] == [str(NAME), str(shared_name("m"))]
    assert all("set dlock_broker='amqp://rabbit:5672//'" in text for text in warnings)


@pytest.mark.invariant("newer-wire-is-left-alone")
def test_message_that_a_newer_worker_parked_is_left_to_one(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    newer = entry(facts={"wire": WIRE_VERSION + 1, "broker": {"unknown": 1}})
    GrantPublisher(APP, store, 60, over_memory).publish_next(NAME, Grant("identity", newer, "turn"))  # type: ignore[arg-type]
    assert (store.ends, store.passed) == ([], ["foreign"])
    assert "left to a worker of a newer version: it has wire version 2" in caplog.text


def test_message_of_another_broker_that_has_workers_is_left_to_them_for_good() -> None:
    store = Store()
    store.attended.add("amqp://rabbit:5672//")
    handover = GrantPublisher(APP, store, 60, over_memory)  # type: ignore[arg-type]
    for broker in ("amqp://rabbit:5672//", "amqp://rabbit:5672/other"):
        handover.publish_next(NAME, Grant("identity", entry(facts={"broker": broker}), "turn"))
    assert store.passed == ["foreign, attended", "foreign"]


def test_message_parked_under_another_url_is_published_if_dlock_broker_names_it() -> None:
    store = Store()
    named = GrantPublisher(APP, store, 60, over_memory, "amqp://rabbit:5672//")  # type: ignore[arg-type]
    foreign = entry(facts={"broker": "amqp://rabbit:5672//"})
    named.publish_next(NAME, Grant("identity", foreign, "turn"))
    assert (store.ends, store.passed) == (["published"], [])


@pytest.mark.invariant("newest-call-stops-the-running-one")
@pytest.mark.parametrize(("keeps_end", "expected"), [(True, "FAILURE"), (False, "REVOKED")])
def test_stored_end_of_a_replaced_call_is_kept(*, keeps_end: bool, expected: str) -> None:
    """Its body ended, its process died before the acknowledgement, and the message was delivered again."""
    text = entry()
    task_id = ParkedMessage.read(text).task_id
    APP.backend.store_result(task_id, ValueError("as it ended"), "FAILURE")
    assert end(APP, text, TaskRevokedError("replaced by newer"), keeps_end=keeps_end)
    assert APP.backend.get_task_meta(task_id, cache=False)["status"] == expected


@pytest.mark.invariant("newest-call-stops-the-running-one")
def test_replaced_call_without_an_end_is_revoked() -> None:
    text = entry()
    task_id = ParkedMessage.read(text).task_id
    APP.backend.forget(task_id)
    assert end(APP, text, TaskRevokedError("replaced by newer"), keeps_end=True)
    assert APP.backend.get_task_meta(task_id, cache=False)["status"] == "REVOKED"


# Ends


class Removing(Store):
    """Gives the entry of each waiter that is taken out, and the next grant once."""

    def __init__(self, entry: str, following: Grant | None = None) -> None:
        super().__init__()
        self.entry, self.following = entry, following

    def remove_waiter(self, name: Any, identity: str, token: str, **facts: Any) -> Any:
        super().remove_waiter(name, identity, token, **facts)
        granted, self.following = self.following, None
        return SimpleNamespace(entry="" if facts.get("ended") else self.entry, granted=granted)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """The errors of the next attempts to store an end. Nothing sleeps."""
    errors: list[Exception] = []

    def store_result(*_: Any, **__: Any) -> None:
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(APP.backend, "store_result", store_result)
    monkeypatch.setattr(results.time, "sleep", lambda _seconds: None)
    return errors


@pytest.mark.parametrize("how", ["expired", "revoked"])
def test_waiter_is_ended_after_the_next_one_was_published(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result backend that does not answer must not delay the next waiter."""
    headers = {"expires": "2020"} if how == "expired" else {}
    store, ends = Removing(entry(headers=headers), Grant("next", entry(), "turn")), []
    monkeypatch.setattr(APP.backend, "store_result", lambda *_, **__: ends.append(list(store.ends)))
    publisher = GrantPublisher(APP, store, 60, over_memory)  # type: ignore[arg-type]
    if how == "expired":
        assert publisher.publish_next(NAME, Grant("identity", store.entry, "turn"))
    else:
        publisher.remove_waiter(NAME, "identity", "revoked while it waited")
    assert ends == [["taken out", "published"]]
    assert store.ends == ["taken out", "published", "ended"]


@pytest.mark.invariant("ends-are-tried-again")
def test_end_that_the_result_backend_does_not_take_is_stored_later(
    stores: list[Exception], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the queue sweeper does not wait for it, and tries one end now and then."""
    now = [0.0]
    monkeypatch.setattr(handoff.time, "monotonic", lambda: now[0])
    publisher = GrantPublisher(APP, Removing(entry()), 60, over_memory, ends_later=True)  # type: ignore[arg-type]
    stores.extend([ConnectionError("gone")] * 2)
    for identity in ("a", "b"):
        publisher.remove_waiter(NAME, identity, "revoked while it waited")
    assert len(stores) == 1
    publisher.store_unended()
    publisher.store_unended()
    assert stores == []
    now[0] += END_LATER_DELAY
    stores.clear()
    publisher.store_unended()
    assert "Task app.known[id1] has ended, but its end cannot be stored; retrying: gone" in caplog.text
    assert [record.levelname for record in caplog.records if record.levelno >= logging.ERROR] == []
    publisher.give_up_unended()
    assert "is not stored" not in caplog.text


@pytest.mark.invariant("ends-are-tried-again")
def test_end_that_is_not_taken_in_time_or_before_the_worker_stops_is_an_error(
    stores: list[Exception], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(handoff.time, "monotonic", lambda: now[0])
    publisher = GrantPublisher(APP, Removing(entry()), 60, over_memory, ends_later=True)  # type: ignore[arg-type]
    stores.extend([ConnectionError("gone")] * 100)
    publisher.remove_waiter(NAME, "a", "revoked while it waited")
    now[0] += END_LATER_WITHIN
    publisher.remove_waiter(NAME, "b", "revoked while it waited")
    publisher.store_unended()
    publisher.give_up_unended()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert [text[: text.index(" has ended")] for text in errors] == ["Task app.known[id1]"] * 2


def test_end_of_an_unknown_task_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    unknown = entry(headers={"task": "app.unknown"}).replace('["app.known"', '["app.unknown"')
    publisher = GrantPublisher(APP, Removing(unknown), 60, over_memory, ends_later=True)  # type: ignore[arg-type]
    publisher.remove_waiter(NAME, "a", "revoked while it waited")
    caplog.clear()
    publisher.give_up_unended()
    assert caplog.messages == []


def test_end_of_a_parked_message_goes_to_its_reply_queue() -> None:
    """Of the result backend `rpc://`."""
    parked = ParkedMessage.read(entry(properties={"reply_to": "client", "correlation_id": "other"}))
    request = parked.request(APP)
    assert (request.id, request.reply_to, request.correlation_id) == ("id1", "client", "other")
