"""Reports of Cluster nodes about one another, in every spelling that servers use."""

import pytest

from celery_dlock.store.redis.cluster import members as cluster_members
from celery_dlock.store.redis.cluster.endpoint import UnexpectedNode
from celery_dlock.store.redis.cluster.members import Members, Outdated
from celery_dlock.store.redis.cluster.slot_map import SlotMap, address_in

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


# Which map is believed


def view(*owners: str, epoch: int = 7, others: str = "", nodes: bool = True) -> SlotMap:
    """A Cluster as one of its nodes tells it: ``ab`` is a primary a with its replica b; `others` keep no slots."""

    def node(name: str) -> list[object]:
        return [f"10.0.0.{ord(name)}".encode(), 7000, name.encode(), []]

    slots = [[n * 100, n * 100 + 99, *map(node, shard)] for n, shard in enumerate(owners)]
    lines = [
        f"{shard[0]} h:1@2 master - 0 0 {epoch - n} connected {n * 100}-{n * 100 + 99}"
        for n, shard in enumerate(owners)
    ]
    lines += [f"{name} h:1@2 slave,fail - 0 0 99 connected" for name in others]
    return SlotMap.of(slots, ASKED, "\n".join(lines) if nodes else "")


KNOWN = view("ab", "cd", "ef")


@pytest.mark.parametrize(
    "told",
    [
        KNOWN,
        view("ab", "cd", "ef", nodes=False),
        view("ab", "cf", others="e"),  # scaled in, and a replica was given to another primary
        view("ab", "cd", "ef", "gh", "ij", "kl", "mn", epoch=12),  # scaled out
        view("b", "d", "f", others="ace", epoch=10),  # all failed over; the dead are not forgotten yet
        view("b", "d", "f", epoch=10),  # ... or they are
        view("b", "d", "f", nodes=False),
        view("xyz", "ab", "cd", others="ef", epoch=20),
    ],
    ids=["same", "no right", "in", "out", "failovers", "failovers, forgotten", "failovers, no right", "replaced"],
)
def test_a_map_of_the_same_cluster_is_believed(told: SlotMap) -> None:
    members = Members()
    members.accept(KNOWN, 0)
    members.check(ASKED, told, 1)
    assert members.foreign == frozenset()


@pytest.mark.parametrize(
    "told",
    [
        view("a", epoch=100),
        view("ab", epoch=100),
        view("ab", "xy", "z", epoch=100),
        view("b", "d", "f", epoch=7),  # replicas that the test made a Cluster: no promotion has raised the epoch
        view("x", "y", "z", epoch=100),
        view("a", nodes=False),
    ],
    ids=["one that left", "a shard", "one of three", "replicas", "none", "no right"],
)
def test_a_map_of_another_cluster_is_refused_also_if_known_nodes_are_in_it(told: SlotMap) -> None:
    members = Members()
    members.accept(KNOWN, 0)
    with pytest.raises(UnexpectedNode, match="restart this process"):
        members.check(ASKED, told, 1)
    assert members.foreign == {ASKED}


def test_an_older_epoch_is_believed_only_once_nothing_newer_was_told_for_long() -> None:
    members = Members()
    members.accept(KNOWN, 0)
    old = view("ab", "cd", "ef", epoch=6)
    for now in (1.0, 1.0 + cluster_members.LAGGING - 0.1):
        with pytest.raises(Outdated):
            members.check(ASKED, old, now)
    members.check(ASKED, old, 1.0 + cluster_members.LAGGING)
    members.accept(KNOWN, 100)
    with pytest.raises(Outdated):
        members.check(ASKED, old, 101)


def test_what_a_believed_map_no_longer_names_is_not_known_any_more() -> None:
    members = Members()
    members.accept(KNOWN, 0)
    members.accept(view("ab", "cd", epoch=9), 1)
    assert members.expected(("10.0.0.101", 7000)) == b""
    with pytest.raises(UnexpectedNode):
        members.check(ASKED, view("e", epoch=100), 2)


def test_a_process_that_was_idle_for_long_knows_as_little_as_a_new_one() -> None:
    members = Members()
    members.touch(0)
    members.accept(KNOWN, 0)
    members.touch(cluster_members.UNUSED)
    assert members.map is KNOWN
    members.touch(2 * cluster_members.UNUSED + 1)
    assert members.map is None
    members.check(ASKED, view("x"), 9999)
