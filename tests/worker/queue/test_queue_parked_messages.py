"""The raw message is parked, and published when it is granted the lock: every field of it, byte for byte."""

from datetime import date, datetime, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from celery import chain, chord, group

from tests.support.environments.queueing import running_stage
from tests.support.messages import (
    COMBINATIONS,
    CONTENT_TYPES,
    assert_same_body_and_properties,
    body_of,
    send_with_every_option,
)
from tests.support.polling import eventually

#: kombu's JSON carries the last five, which the plain one does not.
HEADERS = {
    "x-tenant": "acme\n\ud800{}",
    "trace": {"id": 2**60, "deep": [1, None, 2.5, "ü", {}, ""]},
    "dlock-like": True,
    "x-when": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc),
    "x-day": date(2026, 1, 2),
    "x-cost": Decimal("1.10"),
    "x-uuid": UUID(int=7),
    "x-raw": b"\xff\x00",
}
SECRET = "pässwort\n{}\u2028"


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    with running_stage(tmp_path_factory.mktemp("parcels"), concurrency=12) as made:
        yield made


class Held:
    """A lock that this process holds, and whose grant it then publishes."""

    def __init__(self, stage):
        self.n = stage.fresh()
        self.lock = stage.tasks.parcel.lock_for(self.n)
        assert self.lock.acquire(blocking=False)

    def hand_over(self):
        self.lock.release()


class HeldByABody:
    """... that a body in a pool child holds, and whose grant it then publishes."""

    def __init__(self, stage):
        self.n = stage.fresh()
        # The same lock as that of `parcel`: the child itself runs a `parcel`.
        self.holding = stage.hold(stage.tasks.parcel, self.n)

    def hand_over(self):
        self.holding.let_go()


class HeldByADeadChild:
    """... that died: the worker's main process publishes the grant."""

    def __init__(self, stage):
        self.n, self.stage = stage.fresh(), stage
        self.holding = stage.hold(stage.tasks.parcel, self.n)

    def hand_over(self):
        self.stage.app.control.revoke(self.holding.id, terminate=True, signal="SIGKILL")


HOLDERS = [Held, HeldByABody, HeldByADeadChild]


def parked(stage, queue, held):
    """Let the worker park all that lies in the queue; gives the messages by id, as they were received."""
    first = {message["headers"]["id"]: message for message in stage.lying(queue)}
    stage.consume(queue)
    for one in held:
        eventually(lambda one=one: stage.tasks.parcel.waiting(one.n).count, 10)
    return first


def published(stage, task_id):
    """Return the message as it was published for its grant, while its body waits at its gate: acknowledged late."""
    return eventually(
        lambda: (message := stage.unacked(task_id))["headers"].get("dlock") and message,
        message=f"{task_id} was not published in its turn",
    )


def compare(first, second):
    """Every field, apart from those that have to differ."""
    assert set(second) == set(first)
    headers = dict(second["headers"])
    ours = headers.pop("dlock")
    assert headers == first["headers"]
    assert (ours["conflict_retries"], set(ours)) == (
        1,
        {"identity", "rank", "redelivered", "conflict_retries", "grant"},
    )
    assert_same_body_and_properties(first, second)


@pytest.mark.invariant("parked-message-is-unchanged")
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_field_survives_whatever_the_serializer_and_compression(stage, tasks, queue, holder):
    # A child that dies takes a slot with it for a moment: fewer of those.
    combinations = COMBINATIONS if holder is Held else [("json", None), ("pickle", "zlib"), ("yaml", "bzip2")]
    held = [holder(stage) for _ in combinations]
    results = [
        send_with_every_option(
            tasks.parcel.s(one.n, f"gate of {one.n}", secret=SECRET),
            HEADERS,
            queue=queue,
            serializer=serializer,
            compression=compression,
        )
        for one, (serializer, compression) in zip(held, combinations, strict=True)
    ]
    first = parked(stage, queue, held)
    for one in held:
        one.hand_over()
    for (serializer, compression), result in zip(combinations, results, strict=True):
        second = published(stage, result.id)
        compare(first[result.id], second)
        assert second["content-type"] == CONTENT_TYPES[serializer]
        assert bool(second["headers"].get("compression")) is bool(compression)
        assert second["headers"]["argsrepr"] == "('***',)"
        assert second["properties"]["priority"] == 3
    for one, result in zip(held, results, strict=True):
        stage.open(f"gate of {one.n}")
        assert result.get(timeout=15) == one.n
        assert [(fact["n"], fact["secret"]) for fact in stage.history(what="in", id=result.id)] == [(one.n, SECRET)]
    assert "pässwort" not in stage.worker.log()


@pytest.mark.invariant("parked-message-is-unchanged")
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_links_stamps_and_membership_of_chain_group_and_chord_header_survive(stage, tasks, queue, serializer):
    held = HeldByABody(stage)
    member = tasks.parcel.si(held.n, f"gate of {held.n}").set(queue=queue, serializer=serializer, priority=3)
    member.link(tasks.plain.si(f"link of {held.n}"))
    member.link_error(tasks.failed_link.s())
    header = group(chain(tasks.plain.si("head"), member, tasks.plain.si("next")), tasks.plain.si("other"))
    canvas = chord(header, tasks.plain.s())
    canvas.stamp(batch="b1")
    result = canvas.apply_async()
    (lying,) = eventually(lambda: stage.lying(queue))
    first = parked(stage, queue, [held])[lying["headers"]["id"]]
    held.hand_over()
    second = published(stage, first["headers"]["id"])
    compare(first, second)
    assert "b1" in second["headers"]["stamps"]["batch"]
    _, _, embed = body_of(second)
    assert embed["callbacks"]
    assert embed["errbacks"]
    assert embed["chain"]
    stage.open(f"gate of {held.n}")
    assert sorted(result.get(timeout=15)) == ["next", "other"]
    eventually(lambda: [f for f in stage.history(what="plain") if f"link of {held.n}" in f["args"]])


@pytest.mark.parametrize("place", ["group", "header", "body", "ignored"])
def test_canvas_member_chord_body_and_call_without_result_are_unchanged(stage, tasks, queue, place):
    held = HeldByABody(stage)
    member = tasks.parcel.si(held.n, f"gate of {held.n}").set(queue=queue)
    canvas = {
        "group": lambda: group(member, tasks.plain.si("beside")),
        "header": lambda: chord([member, tasks.plain.si("beside")], tasks.plain.s()),
        "body": lambda: chord([tasks.plain.si("one"), tasks.plain.si("two")], member),
        "ignored": lambda: member.set(ignore_result=True),
    }[place]()
    result = canvas.apply_async()
    (lying,) = eventually(lambda: stage.lying(queue))
    task_id = lying["headers"]["id"]
    first = parked(stage, queue, [held])[task_id]
    assert bool(first["headers"]["ignore_result"]) is (place == "ignored")
    held.hand_over()
    compare(first, published(stage, task_id))
    stage.open(f"gate of {held.n}")
    if place == "ignored":
        stage.entered(id=task_id)
        assert stage.state(task_id) == "PENDING"
    else:
        assert result.get(timeout=15) in ([held.n, "beside"], held.n)


@pytest.mark.invariant("parked-message-is-unchanged")
@pytest.mark.core
def test_a_large_and_a_binary_body_come_through(stage, tasks):
    held = Held(stage)
    big = ["x" * 2_000_000, bytes(range(256))]
    result = tasks.parcel.apply_async((held.n,), {"secret": "", "more": big}, serializer="pickle", compression="zlib")
    small = tasks.parcel.apply_async((held.n,), {"secret": "ü" * 300_000}, serializer="json")
    stage.parked(tasks.parcel, held.n, result, small)
    held.hand_over()
    assert result.get(timeout=15) == small.get(timeout=15) == held.n
    assert stage.history(what="in", id=small.id)[0]["secret"] == "ü" * 300_000
