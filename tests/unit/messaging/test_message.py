"""The contents of a republished copy, and the message that it refers to."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from celery_dlock.messaging.message import Delivery, FirstReceipt, RawMessage, RepublishHeader
from celery_dlock.messaging.wire import WIRE_VERSION
from celery_dlock.options.derived import SKEW
from celery_dlock.store.model import AcquireRequest, Identity, Requester
from tests.unit.fakes import FakeClock

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


def test_republish_header_through_json_keeps_the_first_receipt() -> None:
    given = json.loads(json.dumps(header(rank=None, received=[5, 6, "boot"])))
    assert RepublishHeader.of(given, IDENTITY).first_receipt == FirstReceipt(5, 6, "boot")


@pytest.mark.invariant("newer-wire-is-left-alone")
def test_header_of_a_newer_wire_version_is_not_read_and_one_of_today_s_is() -> None:
    assert RepublishHeader.of(header(wire=WIRE_VERSION + 1, rank="new"), IDENTITY) == RepublishHeader(
        newer_wire=WIRE_VERSION + 1
    )
    for own in (WIRE_VERSION, True, "2", None):
        assert RepublishHeader.of(header(wire=own), IDENTITY) == RepublishHeader(1_700_000_000_000_000, 3)


def a_delivery(since: float, **facts: Any) -> Delivery:
    return Delivery("o", since, since, monitored=False, raw=(), **facts)


def test_age_on_the_same_machine_is_exact_though_its_wall_clock_was_set() -> None:
    clock = FakeClock()
    receipt = FirstReceipt.of(a_delivery(clock.monotonic() - 3), clock)
    clock.now += 10
    clock.wall = lambda: 0.0  # type: ignore[method-assign]  # the wall clock of this machine
    assert receipt.age(clock) == (pytest.approx(13.0), 0.0)


@pytest.mark.parametrize("clock_id", ["another boot", ""])
def test_age_on_another_machine_is_that_of_wall_clocks_with_a_doubt(clock_id: str) -> None:
    """An empty id: that system does not tell which clock it has."""
    clock = FakeClock()
    receipt = FirstReceipt.of(a_delivery(clock.monotonic() - 3), clock)._replace(monotonic_us=1, clock_id=clock_id)
    clock.now += 10
    assert receipt.age(clock) == (pytest.approx(13.0), SKEW)


def test_first_receipt_of_a_copy_is_the_one_that_it_carries() -> None:
    carried = FirstReceipt(5, 6, "another boot")
    assert FirstReceipt.of(a_delivery(9.0, first_receipt=tuple(carried)), FakeClock()) == carried


def test_forged_first_receipt_long_ago_makes_its_message_a_month_old_at_most() -> None:
    assert FirstReceipt(0, 0, "another boot").age(FakeClock())[0] <= 31 * 24 * 3600


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
        header(received=5),
        header(received="567"),
        header(received=[5, 6]),
        header(received=[5.5, 6, ""]),
        header(received=[5, -1, ""]),
        header(received=[2**53 + 1, 6, ""]),
        header(received=[5, 6, None]),
        header(received=[5, 6, "x" * 101]),
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
