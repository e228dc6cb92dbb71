"""The watchdog's own thread, a store without a server, and real children that die."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from celery_dlock.locking import watchdog as watchdog_module
from celery_dlock.locking.watchdog import FREED_WITHIN, QUICK, ROUND, Watchdog
from celery_dlock.runtime import WATCHDOG_TIMEOUT
from celery_dlock.worker.pool_children import ChildWatch
from tests.support.polling import eventually
from tests.unit.fakes import FakeSource, WatchdogHarness

LONG = 60.0  # seconds between two looks, for this test


class Watched(FakeSource):
    """A real child."""

    def __init__(self, pid: int) -> None:
        super().__init__(child=True)
        self.watch = ChildWatch(pid)

    def is_dead(self) -> bool:
        self.dead = self.watch.gone()
        return self.dead

    def pidfd(self) -> int | None:
        return self.watch.pidfd


@pytest.mark.invariant("dead-owner-is-released")
@pytest.mark.core
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="there the next look is what finds a death")
def test_what_a_child_held_is_freed_when_it_dies_and_not_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: freed within a second, though the next look is a minute away; nothing before the death."""
    monkeypatch.setattr(watchdog_module, "ROUND", LONG)
    harness = WatchdogHarness()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        child = Watched(process.pid)
        acquisition = harness.hold(source=child).acquisition
        watchdog = Watchdog({harness.timeout: harness.store}, harness.clock, harness.hooks)
        watchdog.watch(child)
        eventually(lambda: child.pidfd() is not None and len(watchdog.held) == 1)
        time.sleep(0.3)  # what wakes it too early wakes it now
        assert child.told_freed == []
        process.kill()
        died = time.monotonic()
        eventually(lambda: child.told_freed)
        assert time.monotonic() - died < FREED_WITHIN
    assert [freed for freed, _ in child.told_freed] == [acquisition]


@pytest.mark.invariant("dead-owner-is-released")
def test_a_death_is_found_and_released_in_time_although_a_renewal_times_out_first() -> None:
    """A round finds the death. Before its release come one renewal that one server does not answer, and the others."""
    assert ROUND + WATCHDOG_TIMEOUT + QUICK < FREED_WITHIN
