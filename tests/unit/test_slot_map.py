"""What nodes of a Cluster say of one another, in every spelling that servers have for it."""

import pytest

from celery_dlock.slot_map import SlotMap, address_in

ASKED = ("asked.example", 7000)


def told(*ranges: tuple[int, int, list[object]]) -> list[object]:
    replica = [b"10.0.0.9", 7009, b"id9", []]
    return [[start, end, node, replica] for start, end, node in ranges]


def test_the_primary_of_a_slot_is_that_of_its_range_and_no_replica_is_an_address() -> None:
    # In no order: servers promise none.
    reply = told((8000, 16383, [b"10.0.0.2", 7002, b"id2", []]), (0, 7999, [b"10.0.0.1", 7001, b"id1", []]))
    found = SlotMap.of(reply, ASKED)
    assert [found.owner(slot) for slot in (0, 7999, 8000, 16383)] == [
        ("10.0.0.1", 7001), ("10.0.0.1", 7001), ("10.0.0.2", 7002), ("10.0.0.2", 7002),
    ]  # fmt: skip
    assert found.addresses() == (("10.0.0.1", 7001), ("10.0.0.2", 7002))


def test_a_slot_that_has_moved_is_asked_for_at_its_new_owner() -> None:
    found = SlotMap.of(told((0, 16383, [b"10.0.0.1", 7001, b"id1"])), ASKED)  # Redis 6.2 tells no more of a node
    found.moved[5] = "10.0.0.3", 7003
    assert (found.owner(5), found.owner(6)) == (("10.0.0.3", 7003), ("10.0.0.1", 7001))
    assert ("10.0.0.3", 7003) in found.addresses()


@pytest.mark.parametrize(
    ("node", "host"),
    [
        ([b"name.example", 7001, b"id1", [b"ip", b"10.0.0.1"]], "name.example"),
        ([None, 7001, b"id1", []], "asked.example"),
        ([b"", 7001, b"id1"], "asked.example"),
        ([b"?", 7001, b"id1", [b"ip", b"10.0.0.1"]], "10.0.0.1"),
        ([b"?", 7001, b"id1", []], "asked.example"),
        ([b"::1", 7001, b"id1", []], "::1"),
    ],
    ids=["hostname", "unknown", "empty", "hostname missing", "nothing", "IPv6"],
)
def test_a_node_that_does_not_say_its_host_is_where_the_asked_one_is(node: list[object], host: str) -> None:
    assert SlotMap.of(told((0, 16383, node)), ASKED).owner(0) == (host, 7001)


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("MOVED 3999 10.0.0.1:6381", ("10.0.0.1", 6381)),
        ("ASK 3999 name.example:6381", ("name.example", 6381)),
        ("MOVED 3999 ::1:6381", ("::1", 6381)),
        ("MOVED 3999 :6381", ("asked.example", 6381)),
        ("MOVED 3999 ?:6381", ("asked.example", 6381)),
    ],
)
def test_a_redirection_names_a_node(said: str, address: tuple[str, int]) -> None:
    assert address_in(said, ASKED) == address
