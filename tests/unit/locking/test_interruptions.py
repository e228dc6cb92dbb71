"""A soft limit, a signal's exception, a greenlet's kill: it can strike between any two lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from celery_dlock.errors import LockLost
from celery_dlock.locking import client, lease, owner
from celery_dlock.locking import lease_table as slots
from celery_dlock.locking.lease_source import LocalLeaseSource
from celery_dlock.locking.watchdog import Watchdog
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Identity
from tests.unit.fakes import LockClientScene, a_name

FILES = {module.__file__ for module in (lease, client, owner, slots)}
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


def take(scene: LockClientScene) -> None:
    scene.take()


def take_twice(scene: LockClientScene) -> None:
    scene.take()
    scene.take()


def take_and_leave(scene: LockClientScene) -> None:
    scene.lock_client.release(scene.take(), scene.context, FINAL)


def take_twice_and_leave(scene: LockClientScene) -> None:
    scene.take()
    scene.lock_client.release(scene.take(), scene.context)
    scene.lock_client.release(scene.context.entered[-1], scene.context, FINAL)


def end(scene: LockClientScene) -> None:
    """The end of a run, in the last of its exit hooks."""
    for _ in range(9):
        if not scene.context.entered:
            break
        last = len(scene.context.entered) == 1
        scene.lock_client.release(scene.context.entered[-1], scene.context, FINAL if last else ReleaseRequest())
    scene.lock_client.delegate_release(scene.context)


def trouble_after(scene: LockClientScene) -> str:
    """Return the errors that are left when the interrupted owner has ended and the watchdog has looked; "" for none."""
    watchdog = Watchdog(scene.store, scene.clock, 0.4, lambda slot, reason: None)
    watchdog._loop.running.take()  # so no thread starts
    watchdog.watch(LocalLeaseSource(scene.slots, lambda slot, released: None))
    end(scene)
    watchdog.tick()
    if scene.context.entered:
        return "its end never comes to an end"
    if scene.store.kept(a_name()) or scene.slots.records():
        return "the lock is still held"
    try:
        again = scene.take()
    except LockLost:
        return "its owner cannot take it again"
    scene.lock_client.release(again, scene.context)
    return "it cannot be given back again" if scene.store.kept(a_name()) else ""


@pytest.mark.parametrize("work", [take, take_twice, take_and_leave, take_twice_and_leave])
def test_interruption_at_any_line_leaves_no_lock_and_the_owner_can_acquire_again(
    work: Callable[[LockClientScene], None],
) -> None:
    troubles, line = [], 0
    while True:
        line += 1
        scene = LockClientScene()
        where = struck_at(line, partial(work, scene))
        if not where:
            break
        if trouble := trouble_after(scene):
            troubles.append(f"{where}: {trouble}")
    assert line > 10
    assert not troubles


def test_an_interruption_at_any_line_of_a_release_does_not_lose_what_the_end_means() -> None:
    """If this exit hook does not set the done mark and the run mark, the next one does."""
    untold, line = [], 0
    while True:
        line += 1
        scene = LockClientScene()
        lease = scene.take()
        where = struck_at(line, lambda s=scene, e=lease: s.lock_client.release(e, s.context, FINAL))  # type: ignore[misc]
        if not where:
            break
        trouble_after(scene)
        if FINAL not in [ending for _, ending in scene.store.ended]:
            untold.append(where)
    assert line > 10
    assert not untold
