"""The raw message is parked, and published when it is granted the lock: every field of it, byte for byte."""

from datetime import date, datetime, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from celery import chain, chord, group

from tests.support.environments.queueing import running_environment
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
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("parcels"), concurrency=12) as made:
        yield made


class Held:
    """A lock that this process holds, and whose grant it then publishes."""

    def __init__(self, environment):
        self.n = environment.fresh()
        self.lock = environment.tasks.parcel.lock_for(self.n)
        assert self.lock.acquire(blocking=False)

    def hand_over(self):
        self.lock.release()


class HeldByABody:
    """... that a body in a pool child holds, and whose grant it then publishes."""

    def __init__(self, environment):
        self.n = environment.fresh()
        # The same lock as that of `parcel`: the child itself runs a `parcel`.
        self.holding = environment.hold(environment.tasks.parcel, self.n)

    def hand_over(self):
        self.holding.let_go()


class HeldByADeadChild:
    """... that died: the worker's main process publishes the grant."""

    def __init__(self, environment):
        self.n, self.environment = environment.fresh(), environment
        self.holding = environment.hold(environment.tasks.parcel, self.n)

    def hand_over(self):
        self.environment.app.control.revoke(self.holding.id, terminate=True, signal="SIGKILL")


HOLDERS = [Held, HeldByABody, HeldByADeadChild]


def parked(environment, queue, held):
    """Let the worker park all that lies in the queue; gives the messages by id, as they were received."""
    first = {message["headers"]["id"]: message for message in environment.lying(queue)}
    environment.consume(queue)
    for one in held:
        eventually(lambda one=one: environment.tasks.parcel.waiting(one.n).count, 10)
    return first


def published(environment, task_id):
    """Return the message as it was published for its grant, while its body waits at its gate: acknowledged late."""
    return eventually(
        lambda: (message := environment.unacked(task_id))["headers"].get("dlock") and message,
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
        {"wire", "identity", "rank", "redelivered", "conflict_retries", "store_retries", "grant"},
    )
    assert_same_body_and_properties(first, second)


@pytest.mark.invariant("parked-message-is-unchanged")
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_field_survives_whatever_the_serializer_and_compression(environment, tasks, queue, holder):
    # A child that dies takes a slot with it for a moment: fewer of those.
    combinations = COMBINATIONS if holder is Held else [("json", None), ("pickle", "zlib"), ("yaml", "bzip2")]
    held = [holder(environment) for _ in combinations]
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
    first = parked(environment, queue, held)
    for one in held:
        one.hand_over()
    for (serializer, compression), result in zip(combinations, results, strict=True):
        second = published(environment, result.id)
        compare(first[result.id], second)
        assert second["content-type"] == CONTENT_TYPES[serializer]
        assert bool(second["headers"].get("compression")) is bool(compression)
        assert second["headers"]["argsrepr"] == "('***',)"
        assert second["properties"]["priority"] == 3
    for one, result in zip(held, results, strict=True):
        environment.open(f"gate of {one.n}")
        assert result.get(timeout=15) == one.n
        assert [(fact["n"], fact["secret"]) for fact in environment.history(what="in", id=result.id)] == [
            (one.n, SECRET)
        ]
    assert "pässwort" not in environment.worker.log()


@pytest.mark.invariant("parked-message-is-unchanged")
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_links_stamps_and_membership_of_chain_group_and_chord_header_survive(environment, tasks, queue, serializer):
    held = HeldByABody(environment)
    member = tasks.parcel.si(held.n, f"gate of {held.n}").set(queue=queue, serializer=serializer, priority=3)
    member.link(tasks.plain.si(f"link of {held.n}"))
    member.link_error(tasks.failed_link.s())
    header = group(chain(tasks.plain.si("head"), member, tasks.plain.si("next")), tasks.plain.si("other"))
    canvas = chord(header, tasks.plain.s())
    canvas.stamp(batch="b1")
    result = canvas.apply_async()
    (lying,) = eventually(lambda: environment.lying(queue))
    first = parked(environment, queue, [held])[lying["headers"]["id"]]
    held.hand_over()
    second = published(environment, first["headers"]["id"])
    compare(first, second)
    assert "b1" in second["headers"]["stamps"]["batch"]
    _, _, embed = body_of(second)
    assert embed["callbacks"]
    assert embed["errbacks"]
    assert embed["chain"]
    environment.open(f"gate of {held.n}")
    assert sorted(result.get(timeout=15)) == ["next", "other"]
    eventually(lambda: [f for f in environment.history(what="plain") if f"link of {held.n}" in f["args"]])


@pytest.mark.parametrize("place", ["group", "header", "body", "ignored"])
def test_canvas_member_chord_body_and_call_without_result_are_unchanged(environment, tasks, queue, place):
    held = HeldByABody(environment)
    member = tasks.parcel.si(held.n, f"gate of {held.n}").set(queue=queue)
    canvas = {
        "group": lambda: group(member, tasks.plain.si("beside")),
        "header": lambda: chord([member, tasks.plain.si("beside")], tasks.plain.s()),
        "body": lambda: chord([tasks.plain.si("one"), tasks.plain.si("two")], member),
        "ignored": lambda: member.set(ignore_result=True),
    }[place]()
    result = canvas.apply_async()
    (lying,) = eventually(lambda: environment.lying(queue))
    task_id = lying["headers"]["id"]
    first = parked(environment, queue, [held])[task_id]
    assert bool(first["headers"]["ignore_result"]) is (place == "ignored")
    held.hand_over()
    compare(first, published(environment, task_id))
    environment.open(f"gate of {held.n}")
    if place == "ignored":
        environment.entered(id=task_id)
        assert environment.state(task_id) == "PENDING"
    else:
        assert result.get(timeout=15) in ([held.n, "beside"], held.n)


@pytest.mark.invariant("parked-message-is-unchanged")
@pytest.mark.core
def test_a_large_and_a_binary_body_come_through(environment, tasks):
    held = Held(environment)
    big = ["x" * 2_000_000, bytes(range(256))]
    result = tasks.parcel.apply_async((held.n,), {"secret": "", "more": big}, serializer="pickle", compression="zlib")
    small = tasks.parcel.apply_async((held.n,), {"secret": "ü" * 300_000}, serializer="json")
    environment.parked(tasks.parcel, held.n, result, small)
    held.hand_over()
    assert result.get(timeout=15) == small.get(timeout=15) == held.n
    assert environment.history(what="in", id=small.id)[0]["secret"] == "ü" * 300_000
