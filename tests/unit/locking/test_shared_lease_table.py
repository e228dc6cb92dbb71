"""Slots in shared memory: written by a child, read without locks by its parent, also after the child's death."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from celery_dlock.errors import DLockError
from celery_dlock.keys.key_spec import LockName, shared_name
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.locking.shared_lease_table import SharedLeaseTable, WatchdogRecord
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Identity
from tests.support.polling import eventually
from tests.unit.fakes import a_name

OWNER = "0123456789abcdef0123456789abcdef"


@contextlib.contextmanager
def forked(body: Callable[[], None]) -> Iterator[int]:
    """A child that runs ``body``; killed and reaped in the end."""
    with warnings.catch_warnings():
        # Other tests' threads may live; this child takes none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            body()
            code = 0
        os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def child_ends_well(body: Callable[[], None]) -> None:
    with forked(body) as pid:
        assert os.waitpid(pid, 0)[1] == 0, "the child failed"


def kept(lease_table: SharedLeaseTable) -> WatchdogRecord:
    (record,) = lease_table.records()
    return record


# Its limits


def test_a_process_can_hold_64_locks_and_says_so(shared: SharedLeaseTable) -> None:
    held = [shared.open(a_name(str(number)), f"o.{number}", 30.0) for number in range(64)]
    with pytest.raises(DLockError, match="at most 64 locks"):
        shared.open(a_name(), "o.64", 30.0)
    held[5].clear()
    assert shared.open(a_name(), "o.64", 30.0).state is LeaseState.ACQUIRING


def test_the_longest_name_fits_with_an_ending(shared: SharedLeaseTable) -> None:
    name = shared_name("ä" * 500)
    text = f"{'t' * 100}:{name.text}"
    record = shared.open(LockName(text, 1023), f"{OWNER}.{10**9}", 30.0)
    by = '["' + "app.tasks.quite_a_long_name" * 4 + '", "' + OWNER + '", "worker-1@' + "host." * 40 + '", 4194304]'
    ending = ReleaseRequest(final=True, identity=Identity(OWNER, 99, 99).digest, used_ms=10**11, requester=by)
    record.delegate_release(ending.text)
    seen = kept(shared)
    assert (seen.name, seen.acquisition) == (LockName(text, 1023), f"{OWNER}.{10**9}")
    assert ReleaseRequest.from_text(seen.ending) == ending


def test_record_keeps_the_number_of_seats(shared: SharedLeaseTable) -> None:
    name = shared_name("gpu")._replace(seats=100)
    shared.open(name, "o.1", 30.0)
    assert kept(shared).name == name


@pytest.mark.parametrize("by", ["x" * 5_000, "\udce4"], ids=["too long", "half a character"])
def test_an_ending_that_does_not_fit_a_record_still_leaves_the_lock_to_the_watchdog(
    shared: SharedLeaseTable, by: str
) -> None:
    """A release never raises for the store's sake, and nothing stays locked."""
    record = shared.open(a_name(), "o.1", 30.0)
    record.held(130.0)
    record.begin_release()
    record.delegate_release(ReleaseRequest(final=True, requester=by).text)
    seen = kept(shared)
    assert seen.state is LeaseState.RELEASE_DELEGATED
    assert seen.acquisition == "o.1"


def test_threads_of_a_child_never_get_one_record_together(shared: SharedLeaseTable) -> None:
    opened: list[str] = []

    def work(number: int) -> None:
        for turn in range(200):
            record = shared.open(a_name(f"{number}"), f"{number}.{turn}", 30.0)
            record.held(1.0)
            opened.append(record.acquisition)
            assert record.state is LeaseState.HELD
            record.clear()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(opened)) == 1_600
    assert not shared.records()


def test_record_is_found_by_its_acquisition_while_other_threads_open_theirs(
    shared: SharedLeaseTable,
) -> None:
    """Until it is free."""
    mine = shared.open(a_name(), "o.1", 30.0)
    over = threading.Event()

    def others() -> None:
        while not over.is_set():
            for record in [shared.open(a_name(str(number)), f"p.{number}", 30.0) for number in range(50)]:
                record.clear()

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(3_000):
            assert shared.find("o.1") is mine
            assert shared.find("o.2") is None
    finally:
        over.set()
        thread.join()
    mine.clear()
    assert shared.find("o.1") is None


# Across a fork


@pytest.mark.core
def test_what_a_child_writes_its_parent_reads_and_the_other_way_round() -> None:
    lease_table = SharedLeaseTable()
    name = shared_name("sms:5")

    def body() -> None:
        lease_table.adopt()
        record = lease_table.open(name, f"{OWNER}.1", 2.5)
        record.held(100.0)
        eventually(lambda: record.deadline == 200.0, within=20)
        eventually(lambda: record.lost, within=20)
        record.begin_release()
        eventually(lambda: record.state is LeaseState.FREE, within=20)
        # The parent has freed it: the place is free for the next.
        lease_table.open(name, f"{OWNER}.2", 2.5).held(300.0)

    with forked(body) as pid:
        assert eventually(lambda: lease_table.pid, within=20) == pid
        seen = eventually(
            lambda: next((s for s in lease_table.records() if s.state is LeaseState.HELD), None), within=20
        )
        assert seen
        assert (seen.name, seen.acquisition, seen.ttl, seen.deadline) == (name, f"{OWNER}.1", 2.5, 100.0)
        seen.renewed(200.0)
        seen.lose()
        eventually(lambda: seen.state is LeaseState.RELEASING, within=20)
        seen.clear()
        assert os.waitpid(pid, 0)[1] == 0
    last = lease_table.records(dead=True)
    assert [(record.acquisition, record.deadline, record.lost) for record in last] == [(f"{OWNER}.2", 300.0, False)]
    lease_table.close()


def test_each_child_has_memory_of_its_own() -> None:
    first, second = SharedLeaseTable(), SharedLeaseTable()

    def body() -> None:
        first.adopt()
        first.open(a_name(), "o.1", 30.0)

    child_ends_well(body)
    assert len(first.records(dead=True)) == 1
    assert not second.records(dead=True)
    assert second.pid == 0


def test_a_half_written_record_is_not_read_while_its_writer_lives(shared: SharedLeaseTable) -> None:
    record = shared.open(a_name(), "o.1", 30.0)
    shared.words[record._base] += 1  # odd: writing
    assert not shared.records()
    assert [seen.acquisition for seen in shared.records(dead=True)] == ["o.1"]
    shared.words[record._base] += 1
    assert len(shared.records()) == 1


def test_a_reader_never_sees_two_acquisitions_mixed() -> None:
    """The child writes as fast as it can; whatever the parent reads belongs together."""
    lease_table = SharedLeaseTable()
    names = [shared_name(str(number) * (1 + number * 9)) for number in range(10)]

    def body() -> None:
        lease_table.adopt()
        for turn in range(1_000_000):
            which = turn % 10
            record = lease_table.open(names[which], f"{'o' * which}.{which}", float(which))
            record.delegate_release(ReleaseRequest(used_ms=which).text)
            record.clear()

    with forked(body):
        eventually(lambda: lease_table.pid, within=20)
        end, read = time.monotonic() + 1.0, 0
        while time.monotonic() < end:
            for seen in lease_table.records():
                which = int(seen.ttl)
                assert (seen.name, seen.acquisition) == (names[which], f"{'o' * which}.{which}")
                assert seen.ending in ("", ReleaseRequest(used_ms=which).text)
                read += 1
        assert read > 50
    lease_table.close()


@pytest.mark.core
def test_leases_of_a_child_killed_while_writing_are_known() -> None:
    """The finished records are whole. Only the one that was being written may be torn, and that breaks no reader."""
    name, other = shared_name("held"), [shared_name("x" * length) for length in (1, 90)]
    for turn in range(15):
        lease_table = SharedLeaseTable()

        def body(lease_table: SharedLeaseTable = lease_table) -> None:
            lease_table.adopt()
            lease_table.open(name, f"{OWNER}.1", 30.0).held(100.0)
            for number in range(10_000_000):
                record = lease_table.open(other[number % 2], f"{'o' * (number % 30)}.{number}", 30.0)
                record.delegate_release(ReleaseRequest(final=True, requester="i" * (number % 500)).text)
                record.clear()

        with forked(body) as pid:
            # Not any record: between open() and held() the child may be suspended.
            eventually(
                lambda lease_table=lease_table: any(one.state is LeaseState.HELD for one in lease_table.records()),
                within=20,
            )  # type: ignore[misc]
            time.sleep(random.Random(turn).random() / 50)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            first, *rest = lease_table.records(dead=True)
            assert (first.name, first.acquisition, first.state) == (name, f"{OWNER}.1", LeaseState.HELD)
            assert len(rest) <= 1
            for torn in rest:
                ReleaseRequest.from_text(torn.ending)
                torn.clear()
            first.clear()
            assert not lease_table.records(dead=True)
        lease_table.close()
