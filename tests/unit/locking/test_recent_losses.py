"""The times of lost leases, in the memory that pool children share."""

import multiprocessing

import pytest

from celery_dlock.locking import recent_losses
from celery_dlock.locking.recent_losses import KEPT, RecentLosses
from celery_dlock.utils.clock import SystemClock


def test_losses_of_a_forked_process_are_counted() -> None:
    losses = RecentLosses()
    losses.add()
    child = multiprocessing.get_context("fork").Process(target=losses.add)
    child.start()
    child.join()
    assert losses.within(60) == 2


def test_loss_is_not_counted_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = RecentLosses()
    losses.add()
    later = SystemClock.monotonic() + 3601
    monkeypatch.setattr(recent_losses.SystemClock, "monotonic", lambda: later)
    losses.add()
    assert losses.within(3600) == 1


def test_unused_places_are_no_losses_of_a_machine_that_just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_losses.SystemClock, "monotonic", lambda: 10.0)
    assert RecentLosses().within(3600) == 0


def test_oldest_losses_make_room() -> None:
    losses = RecentLosses()
    for _ in range(KEPT + 10):
        losses.add()
    assert losses.within(60) == KEPT
