"""A soft limit, a signal's exception, a greenlet's kill: it can strike between any two lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from celery_dlock.errors import LockLost
from celery_dlock.locking import client, lease, lease_table, owner
from celery_dlock.locking.client import LockClient
from celery_dlock.locking.events import Listeners
from celery_dlock.locking.lease_source import LocalLeaseSource
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.locking.shared_lease_table import SharedLeaseTable
from celery_dlock.locking.watchdog import Watchdog, WatchdogHooks
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Identity
from tests.unit.fakes import LockClientHarness, a_name

FILES = {module.__file__ for module in (lease, client, owner, lease_table)}
FINAL = ReleaseRequest(final=True, identity=Identity("id1").digest, used_ms=60_000, requester="me")


class Struck(BaseException):
    pass


def struck_at(line: int, work: Callable[[], object]) -> str:
    """Run ``work`` and raise before the given line of the library in it. Return that place; "" if there is none."""
    seen, where = 0, ""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen, where
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            seen += 1
            if seen == line:
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise Struck
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except Struck:
        return where
    finally:
        sys.settrace(before)
    return ""


def take(harness: LockClientHarness) -> None:
    harness.take()


def take_twice(harness: LockClientHarness) -> None:
    harness.take()
    harness.take()


def take_and_leave(harness: LockClientHarness) -> None:
    harness.lock_client.release(harness.take(), harness.context, FINAL)


def take_twice_and_leave(harness: LockClientHarness) -> None:
    harness.take()
    harness.lock_client.release(harness.take(), harness.context)
    harness.lock_client.release(harness.context.entered[-1], harness.context, FINAL)


def end(harness: LockClientHarness) -> None:
    """The end of a run, in the last of its exit hooks."""
    for _ in range(9):
        if not harness.context.entered:
            break
        last = len(harness.context.entered) == 1
        harness.lock_client.release(harness.context.entered[-1], harness.context, FINAL if last else ReleaseRequest())
    for each in {harness.lock_client, *harness.context.open_acquisitions.values()}:
        each.delegate_release(harness.context)


def trouble_after(harness: LockClientHarness) -> str:
    """Return the errors that are left when the interrupted owner has ended and the watchdog has looked; "" for none."""
    watchdog = Watchdog({0.4: harness.store}, harness.clock, WatchdogHooks())
    watchdog._loop.running.acquire(blocking=False)  # so no thread starts
    watchdog.watch(LocalLeaseSource(harness.lease_table, lambda record, released: None))
    end(harness)
    watchdog.run_round()
    if harness.context.entered:
        return "its end never comes to an end"
    if harness.store.kept(a_name()) or harness.lease_table.records():
        return "the lock is still held"
    try:
        again = harness.take()
    except LockLost:
        return "its owner cannot take it again"
    harness.lock_client.release(again, harness.context)
    return "it cannot be given back again" if harness.store.kept(a_name()) else ""


@pytest.mark.parametrize("work", [take, take_twice, take_and_leave, take_twice_and_leave])
def test_interruption_at_any_line_leaves_no_lock_and_the_owner_can_acquire_again(
    work: Callable[[LockClientHarness], None],
) -> None:
    troubles, line = [], 0
    while True:
        line += 1
        harness = LockClientHarness()
        where = struck_at(line, partial(work, harness))
        if not where:
            break
        if trouble := trouble_after(harness):
            troubles.append(f"{where}: {trouble}")
    assert line > 10
    assert not troubles


def test_acquisition_interrupted_at_two_apps_is_left_to_the_watchdog_of_its_own_app() -> None:
    """The second strike hits the step that gives the acquisition to the watchdog, so the end of the run does it."""
    ours, other = LockClientHarness(), LockClientHarness()
    acquisition = ours.context.next_acquisition(other.lock_client)
    record = other.lease_table.open(a_name(), acquisition, 30.0)
    ours.lock_client.delegate_release(ours.context)
    assert record.state is LeaseState.ACQUIRING
    end(ours)
    assert record.state is LeaseState.RELEASE_DELEGATED
    assert not ours.context.open_acquisitions


@pytest.mark.invariant("descendants-hold-nothing")
def test_end_of_a_process_that_the_body_forked_releases_no_lease_of_its_parent(
    shared: SharedLeaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is in memory that the two share, so a late write would make the watchdog release the parent's lock."""
    harness = LockClientHarness()
    harness.lock_client = LockClient(harness.store, shared, harness.clock, Listeners())
    lease = harness.take()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        end(harness)
    assert lease.record.state is LeaseState.HELD
    assert harness.store.kept(a_name())


def test_an_interruption_at_any_line_of_a_release_does_not_lose_what_the_end_means() -> None:
    """If this exit hook does not set the done mark and the run mark, the next one does."""
    untold, line = [], 0
    while True:
        line += 1
        harness = LockClientHarness()
        lease = harness.take()
        where = struck_at(line, lambda s=harness, e=lease: s.lock_client.release(e, s.context, FINAL))  # type: ignore[misc]
        if not where:
            break
        trouble_after(harness)
        if FINAL not in [ending for _, ending in harness.store.ended]:
            untold.append(where)
    assert line > 10
    assert not untold
