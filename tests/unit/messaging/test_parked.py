"""A parked message: what goes into the store comes out of it, or is refused before it goes in."""

from __future__ import annotations

import json
import math
import uuid
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.serialization import dumps

from celery_dlock.errors import DLockError
from celery_dlock.messaging.message import RawMessage
from celery_dlock.messaging.parked import ParkedMessage

BROKER = "redis://localhost:6379/0"
RANK = 2**53 - 1

texts = st.text(st.characters())  # lone surrogates too
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def raw(**changes: Any) -> RawMessage:
    fields: dict[str, Any] = {
        "body": '[[1], {}, {"callbacks": null}]',
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {"task": "app.post", "id": "id1", "expires": None},
        "properties": {"priority": 5},
        "queue": "celery",
    }
    return RawMessage(**{**fields, **changes})


def headers(**changes: Any) -> dict[str, Any]:
    return {"task": "app.post", "id": "id1", **changes}


def parked(rank_us: int = RANK, tries: int = 3, **changes: Any) -> ParkedMessage:
    return ParkedMessage.of(tuple(raw(**changes)), BROKER, rank_us, tries)


def typed(value: object) -> object:
    """Unchanged, with the types: 1, 1.0 and True are three values."""
    if isinstance(value, dict):
        return {key: typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [typed(inner) for inner in value]
    return (type(value), repr(value))


# There and back


@given(
    body=texts | st.binary(),
    task=texts,
    task_id=texts,
    more=st.dictionaries(st.text("abc", min_size=3), values, max_size=4),
    rank=st.integers(0, 2**53),
    tries=st.integers(0, 10**6),
    queue=texts.filter(bool),
)
def test_what_was_parked_is_read_as_it_was(
    *, body: str | bytes, task: str, task_id: str, more: dict[str, Any], rank: int, tries: int, queue: str
) -> None:
    sent = {**more, "task": task, "id": task_id}
    found = ParkedMessage.read(parked(rank, tries, body=body, headers=sent, queue=queue).text())
    assert (found.task, found.task_id, found.broker, found.rank_us, found.conflict_retries) == (
        task, task_id, BROKER, rank, tries,
    )  # fmt: skip
    assert (found.raw.body, type(found.raw.body)) == (body, type(body))
    assert typed(found.raw.headers) == typed(sent)
    assert found.raw.queue == queue


def test_values_that_only_celerys_json_knows_are_read_as_they_were() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone.utc)
    known = headers(at=at, id2=uuid.UUID(int=5), price=Decimal("1.10"), sealed=b"\xff\x00", plain=b"x")
    assert ParkedMessage.read(parked(headers=known).text()).raw.headers == known


def test_of_its_properties_it_keeps_those_that_are_published_again() -> None:
    kept = {"correlation_id": "c", "reply_to": "r", "priority": 0, "delivery_mode": 2}
    gone = {"delivery_tag": object(), "delivery_info": {"redelivered": True}, "body_encoding": "base64"}
    assert ParkedMessage.read(parked(properties={**kept, **gone}).text()).raw.properties == kept
    assert ParkedMessage.read(parked(properties=gone).text()).raw.properties == {}


@pytest.mark.parametrize("encoding", [None, "binary", "utf-8"])
def test_how_its_body_is_encoded_is_kept(encoding: str | None) -> None:
    assert ParkedMessage.read(parked(content_encoding=encoding).text()).raw.content_encoding == encoding


# The first line


@given(task=texts, task_id=texts, body=texts)
def test_the_first_line_says_whose_it_is_in_one_line_of_ascii(task: str, task_id: str, body: str) -> None:
    first, _, rest = parked(body=body, headers={"task": task, "id": task_id}).text().partition("\n")
    assert json.loads(first) == [task, task_id]
    assert first.isascii()
    assert "\n" not in rest


@pytest.mark.parametrize("text", ["", "{", "7\n{}", '["a"]\n{}'])
def test_call_in_a_malformed_text_is_empty(text: str) -> None:
    assert ParkedMessage.call_in(text) == ""


def test_call_in_a_parked_text_is_its_task_and_id() -> None:
    assert ParkedMessage.call_in(parked().text()) == "app.post[id1]"


def test_the_first_line_shows_no_argument() -> None:
    told = parked(body='[["s3cret"], {}, {}]', headers=headers(argsrepr="('s3cret',)")).text()
    assert "s3cret" not in told.partition("\n")[0]


def test_one_parked_message_is_one_text() -> None:
    """A message parked twice is the same entry."""
    assert parked().text() == parked().text() == ParkedMessage.read(parked().text()).text()


# Refused before it is parked


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, 1j, print, {("a", "b"): 1}], ids=lambda value: type(value).__name__
)
def test_a_header_that_json_has_no_form_for_is_refused(value: object) -> None:
    with pytest.raises(DLockError, match="its headers cannot be written as JSON"):
        parked(headers=headers(odd=value)).text()


def test_a_header_that_contains_itself_is_refused() -> None:
    odd: list[Any] = []
    odd.append(odd)
    with pytest.raises(DLockError, match="cannot be parked"):
        parked(headers=headers(odd=odd)).text()


def test_a_message_of_protocol_1_is_refused() -> None:
    with pytest.raises(DLockError, match="protocol 1"):
        parked(headers={})


def test_a_message_of_an_unknown_queue_is_refused() -> None:
    with pytest.raises(DLockError, match="the queue of this message is unknown"):
        parked(queue=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"headers": headers(id=None)},
        {"headers": headers(id=5)},
        {"headers": headers(id=["id1"])},
        {"properties": {"correlation_id": 5}},
        {"properties": {"reply_to": ["r"]}},
        {"properties": {"priority": "high"}},
        {"properties": {"delivery_mode": "persistent"}},
        {"content_type": None},
        {"content_encoding": 8},
        {"body": None},
        {"body": {"a": 1}},
    ],
    ids=repr,
)
def test_what_could_not_be_read_again_is_refused_before_it_is_parked(changes: dict[str, Any]) -> None:
    """Its publisher gets the error now. Among the dead letters, it would be found late or never."""
    with pytest.raises(DLockError):
        parked(**changes).text()


# Invalid texts


def changed(**facts: Any) -> str:
    first, _, rest = parked().text().partition("\n")
    return f"{first}\n{json.dumps({**json.loads(rest), **facts})}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "text",
        "{}\n{}",
        '["app.post"]\n{}',
        '["app.post", "id1"]',
        '["app.post", "id1"]\n',
        '["app.post", "id1"]\n[]',
        '["app.post", "id1"]\nnull',
        '["app.post", "id1"]\n{}',
        '["app.post", "id1"]\n{"body":',
        changed(body=5),
        changed(binary=True),
        changed(binary=True, body="é"),
        changed(headers=None),
        changed(headers=[]),
        changed(headers="task"),
        changed(headers={}),
        changed(headers={"task": "app.other", "id": "id1"}),
        changed(headers={"task": "app.post", "id": "id2"}),
        changed(properties=None),
        changed(properties=[]),
        changed(properties={"priority": "5"}),
        changed(queue=None),
        changed(queue=5),
        changed(type=None),
        changed(broker=None),
        changed(rank=None),
        changed(rank="5"),
        changed(rank=1.5),
        changed(rank=True),
        changed(conflict_retries=None),
        changed(conflict_retries="1"),
    ],
)
def test_what_is_no_parked_message_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a parked message"):
        ParkedMessage.read(text)


@given(texts | st.lists(values, max_size=3).map(lambda lines: "\n".join(map(json.dumps, lines))))
def test_reading_any_text_ends_in_a_parked_message_or_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a parked message"):
        ParkedMessage.read(text)


@given(st.data())
def test_a_torn_or_changed_parked_message_is_read_as_a_parked_message_or_refused(data: st.DataObject) -> None:
    whole = parked(body=b"\x00\xff", headers=headers(a=[1, {"b": None}])).text()
    at = data.draw(st.integers(0, len(whole) - 1))
    to = data.draw(st.integers(at, len(whole)))
    torn = whole[:at] + data.draw(st.sampled_from(["", "\n", '"', "5", "null", "é"])) + whole[to:]
    try:
        found = ParkedMessage.read(torn)
    except ValueError:
        return
    assert isinstance(found.text(), str)


# Its expiry


@pytest.mark.parametrize(("seconds", "expected"), [(-3600, True), (-1, True), (60, False), (3600, False)])
@pytest.mark.parametrize("zone", ["+00:00", "Z", "", "+05:30"])
def test_it_has_expired_when_the_moment_in_its_header_is_past(seconds: int, zone: str, expected: bool) -> None:
    at = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    if zone == "+05:30":
        at = at.astimezone(timezone(timedelta(hours=5, minutes=30)))
    told = at.replace(tzinfo=None).isoformat() + zone
    assert parked(headers=headers(expires=told)).expired is expected


@pytest.mark.parametrize("expires", ["", "soon", 5, math.inf, {"at": "2020"}])
def test_parked_message_with_unreadable_expiry_is_refused_before_it_is_parked(expires: object) -> None:
    with pytest.raises(DLockError, match="the message cannot be parked: invalid time"):
        parked(headers=headers(expires=expires)).text()


def test_without_a_moment_it_never_expires() -> None:
    assert not parked(headers=headers(expires=None)).expired
    assert not ParkedMessage.of(tuple(raw(headers={"task": "t", "id": "i"})), BROKER, 1, 0).expired


# What stands beside its arguments


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_embed_is_read_from_any_serializer_that_the_app_accepts(serializer: str) -> None:
    app = Celery("a", set_as_current=False)
    app.conf.accept_content = [serializer]
    beside = {"callbacks": None, "errbacks": None, "chain": [{"task": "app.next"}], "chord": None}
    kind, encoding, body = dumps([[1], {}, beside], serializer)
    found = parked(body=body, content_type=kind, content_encoding=encoding)
    assert found.embedded(app) == beside
    assert ParkedMessage.read(found.text()).embedded(app) == beside


@pytest.mark.parametrize("body", ["", "no json", "[]", "[1, 2]", "5", "[[], {}, null]", "[[], {}, 5]"])
def test_of_a_body_that_cannot_be_read_there_is_nothing(body: str) -> None:
    assert parked(body=body).embedded(Celery("a", set_as_current=False)) == {}


def test_a_serialiser_that_the_app_does_not_accept_is_not_run() -> None:
    app = Celery("a", set_as_current=False)
    app.conf.accept_content = ["json"]
    kind, encoding, body = dumps([[], {}, {"chain": ["x"]}], "pickle")
    assert parked(body=body, content_type=kind, content_encoding=encoding).embedded(app) == {}
