"""Packets are late, replies are lost, connections are cut or forgotten, and a worker is cut off from the store."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from celery_dlock.store.redis.scripts import SCRIPTS
from tests.conftest import WORKERS
from tests.support.environments.network import (
    BESIDE,
    COMEBACK,
    LONG_TTL,
    TO_BROKER,
    TO_STORE,
    TTL,
    Disturbance,
    NetworkEnvironment,
    network_environment,
)
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.scripts import shas

#: Of a machine that runs other tests too.
SLACK = 1.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkEnvironment]:
    with network_environment(tmp_path_factory.mktemp("network")) as environment:
        yield environment


@pytest.fixture
def environment(made: NetworkEnvironment, request: pytest.FixtureRequest) -> Iterator[NetworkEnvironment]:
    request.node.stash[WORKERS] = [made.behind, made.beside]
    yield made
    made.mend()


# The network disturbs, and the lock stays


@pytest.mark.invariant("cut-connections-lose-no-lease")
@pytest.mark.parametrize("name", TO_STORE)
def test_disturbed_way_to_the_store_loses_no_lease_and_no_release(environment: NetworkEnvironment, name: str) -> None:
    """The body continues, its lease is renewed and its release arrives."""
    check_kept(environment, environment.store, TO_STORE[name])


@pytest.mark.invariant("cut-connections-lose-no-lease")
@pytest.mark.parametrize("name", TO_BROKER)
def test_disturbed_way_to_the_broker_loses_no_lease_and_no_release(environment: NetworkEnvironment, name: str) -> None:
    """The body continues, its lease is renewed and its release arrives."""
    check_kept(environment, environment.broker, TO_BROKER[name])


def check_kept(environment: NetworkEnvironment, proxy: Proxy, disturbance: Disturbance) -> None:
    row = environment.row()
    result, start = environment.begin("works", row, disturbance.lasts)
    end = environment.watch(start, lambda age: disturbance.strike(proxy, age))
    freed = environment.free(start)
    proxy.set_mode("pass")
    assert end["held"] is True
    assert freed - end["at"] <= disturbance.freed_within
    assert result.get(timeout=20) is True
    assert environment.lost(start) == []
    assert environment.send("works", row, 0).get(timeout=60) is True


@pytest.mark.invariant("slow-answers-lose-no-lease")
def test_answers_that_take_0_3_to_1_s_lose_no_lease_and_no_task(
    environment: NetworkEnvironment,
) -> None:
    """The answers of store and broker; no bodies overlap."""
    environment.store.set_delay(0.3, 1.0)
    environment.broker.set_delay(0.3, 1.0)
    row, crowded = environment.row(), environment.row()
    result, start = environment.begin("works_far_away", row, LONG_TTL + 1)
    crowd = [environment.send("works_far_away", crowded, 0.1) for _ in range(3)]
    end = environment.watch(start, lambda age: None)
    freed = environment.free(start)
    assert end["held"] is True
    assert [told.get(timeout=30) for told in [result, *crowd]] == [True] * 4
    assert environment.lost(start) == []
    assert overlaps(environment, crowded) == []
    assert freed - end["at"] <= 1.0 + SLACK


@pytest.mark.invariant("lost-replies-leave-no-lock")
def test_replies_lost_repeatedly_leave_no_lock_stuck_or_doubled(
    environment: NetworkEnvironment,
) -> None:
    """Every task ends."""
    rows = [environment.row() for _ in range(3)]
    environment.store.set_mode("cut_reply", every=3, containing=b"EVALSHA")
    results = [environment.send("counts", row) for _ in range(7) for row in rows]
    assert [result.get(timeout=60) for result in results] == [True] * 21
    starts = [start for row in rows for start in environment.notes.all(row, "start")]
    for start in starts:
        environment.free(start)
    freed, last = time.monotonic(), max(end["at"] for row in rows for end in environment.notes.all(row, "end"))
    assert freed - last <= 1.0
    counts = [count for row in rows for count in environment.notes.all(row, "count")]
    assert [(count["acq"], count["count"]) for count in counts] == [(count["ours"], None) for count in counts]  # once
    assert len(starts) == 21
    assert [overlaps(environment, row) for row in rows] == [[], [], []]
    assert [environment.lost(start) for start in starts if environment.lost(start)] == []
    assert environment.locks.keys("*tombstone*"), "no acquire was cut: this run proved nothing"


def overlaps(environment: NetworkEnvironment, row: str) -> list[Any]:
    """Bodies of that row that began before the one before them had ended."""
    runs = zip(environment.notes.all(row, "start"), environment.notes.all(row, "end"), strict=True)
    return [(one, two) for one, two in pairwise(sorted((a["at"], b["at"]) for a, b in runs)) if two[0] < one[1]]


# One worker is cut off from the store for longer than the ttl, the other is not


@dataclass(frozen=True)
class Partition:
    environment: NetworkEnvironment
    cut_off_at: float
    start: dict[str, Any]
    """The body that holds when its worker is cut off."""
    successor: dict[str, Any]
    """The start of the next one, on the other worker."""
    successor_ended: dict[str, Any]
    owner_after_late_release: str
    comebacks: list[list[str]]
    """The workers that ran the messages which the worker received while it was cut off."""


@pytest.fixture(scope="module")
def partition(made: NetworkEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Partition:
    made.mend()
    row, gate = made.row(), tmp_path_factory.mktemp("gate") / "open"
    came_back = [made.row() for _ in range(2)]
    held, start = made.begin("insists", row, TTL + 2.0)
    made.store.set_mode("blackhole")
    cut_off_at = time.monotonic()
    successor_result = made.send("works", row, 60, str(gate), queue=BESIDE)
    results = {came: made.send("works", came, 0) for came in came_back}
    for result in results.values():
        made.behind.wait_for_log(rf"{result.id}\] received")
    # While it waits for an answer, so that the other one gets what is delivered again.
    made.consumer("cancel", made.behind)
    made.consumer("add", made.beside)
    for result in results.values():
        assert result.get(timeout=40) is True
    made.consumer("cancel", made.beside)
    made.consumer("add", made.behind)
    successor = eventually(lambda: made.notes.all(row, "start")[1:], 20, message="nobody goes on")[0]
    made.notes.first(row, "end")
    with made.locks.monitor() as monitor:  # type: ignore[no-untyped-call]
        made.store.set_mode("pass")
        next(
            line
            for line in monitor.listen()
            if any(sha in line["command"] for sha in shas(SCRIPTS["release"])) and start["acq"] in line["command"]
        )
    owner = made.locks.hget(start["key"], "acq")
    gate.touch()
    ends = eventually(lambda: made.notes.all(row, "end")[1:], message="the successor does not end")
    assert [result.get(timeout=20) for result in (held, successor_result)] == [False, True]
    assert all(
        re.search(rf"{result.id}\] is republished, retrying in", made.behind.log()) for result in results.values()
    )
    nodes = [[start["node"] for start in made.notes.all(came, "start")] for came in came_back]
    return Partition(made, cut_off_at, start, successor, ends[0], owner, nodes)


@pytest.mark.invariant("partitioned-worker-is-reported")
def test_partitioned_holder_learns_of_the_loss_before_another_one_holds(partition: Partition) -> None:
    lost = partition.environment.lost(partition.start)[0]
    assert lost["at"] < partition.successor["at"]
    assert lost["reason"].startswith("no renewal was confirmed before its deadline: ")


@pytest.mark.invariant("partitioned-worker-is-reported")
def test_its_ensure_raises_before_another_one_holds_and_never_passes_again(partition: Partition) -> None:
    row = partition.start["row"]
    assert partition.environment.notes.first(row, "LockLost", 0)["at"] < partition.successor["at"]
    assert partition.environment.notes.all(row, "a lost lease passed") == []


@pytest.mark.invariant("partitioned-worker-is-reported")
def test_the_other_worker_goes_on_with_that_name_after_the_ttl(partition: Partition) -> None:
    assert partition.successor["node"] == partition.environment.beside.node
    assert partition.successor["token"] > partition.start["token"]
    assert partition.successor["at"] - partition.cut_off_at <= TTL + COMEBACK + SLACK


@pytest.mark.invariant("partitioned-worker-is-reported")
def test_its_late_release_frees_nothing_of_the_next_holders(partition: Partition) -> None:
    assert partition.owner_after_late_release == partition.successor["acq"]
    assert partition.successor_ended["held"] is True


@pytest.mark.invariant("partitioned-worker-is-reported")
def test_the_messages_that_it_received_meanwhile_run_once_and_elsewhere(partition: Partition) -> None:
    assert partition.comebacks == [[partition.environment.beside.node]] * 2
