"""The contents of a republished copy, and the message that it refers to."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from celery_dlock.messaging.message import Delivery, RawMessage, RepublishHeader
from celery_dlock.store.model import AcquireRequest, Identity, Requester

IDENTITY = Identity("id1", 2, 1)


def header(**changes: Any) -> dict[str, Any]:
    return {"identity": IDENTITY.digest, "rank": 1_700_000_000_000_000, "conflict_retries": 3} | changes


def test_republish_header_through_json_keeps_rank_and_conflict_retries() -> None:
    for given in (header(), json.loads(json.dumps(header()))):
        assert RepublishHeader.of(given, IDENTITY) == RepublishHeader(1_700_000_000_000_000, 3)


def test_republish_header_keeps_store_retries_and_redelivered() -> None:
    assert RepublishHeader.of(header(store_retries=2, redelivered=True), IDENTITY) == RepublishHeader(
        1_700_000_000_000_000, 3, "", 2, redelivered=True
    )


def test_republish_header_without_rank_keeps_conflict_retries() -> None:
    """Republished because the store did not answer: its delay grows with each try."""
    assert RepublishHeader.of(header(rank=None), IDENTITY) == RepublishHeader(None, 3)


@pytest.mark.parametrize(
    "other", [Identity("id1", 3, 1), Identity("id1", 2, 2), Identity("id2", 2, 1), Identity("id1"), Identity("")]
)
def test_republish_header_of_another_identity_is_empty(other: Identity) -> None:
    """Celery copies headers into the messages that a task publishes, its own retries too."""
    assert RepublishHeader.of(header(), other) == RepublishHeader()


@pytest.mark.parametrize(
    "given",
    [
        None,
        "text",
        5,
        [],
        {},
        {"identity": IDENTITY.digest},
        header(identity=None),
        header(rank="5"),
        header(rank=1.5),
        header(conflict_retries=None),
        header(conflict_retries="3"),
        header(conflict_retries=10**400),
        header(rank=10**400),
        header(rank=-1),
        header(grant="x" * 101),
        header(grant="\ud800"),
        header(store_retries=2**31),
        header(store_retries="3"),
        header(redelivered=1),
    ],
    ids=repr,
)
def test_malformed_republish_header_is_empty(given: Any) -> None:
    assert RepublishHeader.of(given, IDENTITY) == RepublishHeader(None, 0)


def test_republish_header_with_negative_retries_is_empty() -> None:
    assert RepublishHeader.of(header(conflict_retries=-4), IDENTITY).conflict_retries == 0


def test_an_identity_is_task_id_retries_and_nesting_and_its_digest_tells_them_apart() -> None:
    identities = [
        Identity(task_id, retries, nesting)
        for task_id in ("1", "11", "1:1", "", "ä", "\udce4", "x" * 5_000, "{}\n")
        for retries in (0, 1, 11)
        for nesting in (0, 1, 11)
    ]
    digests = {identity.digest for identity in identities}
    assert len(digests) == len(identities)
    assert all(len(digest) == 32 and digest.isalnum() for digest in digests)
    # Part of the wire format: another version of this package must read the same marks.
    assert Identity("id1", 2, 1).digest == "d04ec4c8e2bcdeb721115a95487ec703"


def test_a_delivery_reaches_the_child_as_it_was() -> None:
    raw = RawMessage(b"body", "application/json", "utf-8", {"task": "t"}, {"priority": 3}, "celery")
    delivery = Delivery(
        owner="o", delivered=1.5, since=2.5, monitored=True, rank_us=None, conflict_retries=2, raw=tuple(raw)
    )
    assert Delivery(*pickle.loads(pickle.dumps(tuple(delivery)))) == delivery
    assert RawMessage(*delivery.raw) == raw


def test_a_messages_body_is_pickled_once_beside_the_message_itself() -> None:
    """The raw message is made of the request's own objects, which pickle writes only once."""
    body = b"x" * 100_000
    headers = {"task": "t", "id": "id1"}
    alone = pickle.dumps((body, headers))
    raw = RawMessage(body, "application/json", "utf-8", headers, {}, "celery")
    beside = pickle.dumps((body, headers, tuple(Delivery("o", 1.0, 1.0, False, tuple(raw)))))
    assert len(beside) - len(alone) < 200


@pytest.mark.invariant("arguments-stay-secret")
def test_a_claim_and_a_holder_name_the_task_and_never_its_arguments() -> None:
    by = Requester.of("app.post", "id1", "node", 5)
    assert by == ("app.post", "id1", "node", "5")
    assert json.loads(by.text) == ["app.post", "id1", "node", "5"]
    assert AcquireRequest(by).requester == by
