"""The line of callers that wait for a lock: what each of them owes to the next one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlock.errors import StoreUnavailable
from celery_dlock.locking import waiting
from celery_dlock.locking.waiting import AFTER_EXPIRY, AT_ONCE, RECENT, SERVER_LATE, Line, RecentWake
from celery_dlock.store.holder_model import Holder
from celery_dlock.store.model import AcquireRequest, Duplicate, Held, Requester, Tombstoned
from tests.unit.fakes import FakeClock, a_name

NAME, OTHER = a_name("x"), a_name("y")
REQUEST = AcquireRequest(Requester("", "", "node", "1"), notify=True)


def held(**facts: Any) -> Held:
    return Held(Holder(None, None, "node", 1, since=0.0, expires_in=30.0, **facts), same_message=False, rank_us=7)


class Waits:
    """A listener whose waits end as planned: woken after so many seconds, not at all (None), or with an exception."""

    def __init__(self, clock: FakeClock, *ends: float | BaseException | None) -> None:
        self.clock = clock
        self.ends: Iterator[float | BaseException | None] = iter(ends)
        self.passed_on = 0

    def wait(self, timeout: float) -> bool:
        end = next(self.ends)
        if isinstance(end, BaseException):
            raise end
        self.clock.now += timeout if end is None else end
        return end is not None

    def pass_on(self) -> None:
        self.passed_on += 1


class Killed(BaseException):
    pass


def line(listener: Waits, *answers: Any, recent: RecentWake | None = None) -> Line:
    coming = iter(answers)

    def acquire(request: AcquireRequest) -> Any:
        assert request.waited
        answer = next(coming)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return Line(NAME, acquire, listener, listener.clock, recent or RecentWake(listener.clock))


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.parametrize(
    ("end", "answers", "passed_on"),
    [
        (0.5, [Duplicate()], 1),
        (None, [Duplicate()], 0),  # it was not woken
        (0.5, [held(), Duplicate()], 0),  # the refusal has marked the lock
        (0.5, [held(kind="min_hold"), Duplicate()], 1),  # a kept lock has no release
        (0.5, [held(kind="keep_on_retry"), Duplicate()], 1),
        (0.5, [held(kind="operator"), Duplicate()], 1),
        (0.5, [Tombstoned()], 1),
    ],
)
def test_woken_caller_that_ends_without_the_lock_passes_its_wake_up_on(
    end: float | None, answers: list[Any], passed_on: int
) -> None:
    listener = Waits(FakeClock(), end, None)
    assert line(listener, *answers).wait(REQUEST, held(), None, while_releasing=False) == answers[-1]
    assert listener.passed_on == passed_on


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.parametrize(("ends", "answers"), [([Killed()], []), ([0.5], [Killed()])], ids=["in the wait", "after it"])
def test_caller_that_is_interrupted_passes_on_what_it_may_have_got(ends: list[Any], answers: list[Any]) -> None:
    listener = Waits(FakeClock(), *ends)
    with pytest.raises(Killed):
        line(listener, *answers).wait(REQUEST, held(), None, while_releasing=False)
    assert listener.passed_on == 1


def test_caller_that_the_store_does_not_answer_sends_nothing_more() -> None:
    listener = Waits(FakeClock(), 0.5)
    with pytest.raises(StoreUnavailable):
        line(listener, StoreUnavailable("away")).wait(REQUEST, held(), None, while_releasing=False)
    assert listener.passed_on == 0


@pytest.mark.invariant("no-wake-up-is-lost")
def test_caller_whose_time_is_over_passes_on_what_it_knows_of_a_kept_lock() -> None:
    listener = Waits(FakeClock(), 0.5, None)
    refusals = [held(kind="min_hold")] * 2
    assert line(listener, *refusals).wait(REQUEST, held(), 1.0, while_releasing=False) is refusals[-1]
    assert listener.passed_on == 1


def test_wait_for_the_end_of_min_hold_is_ended_by_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected: 0.1 s before the end, the process stops waiting for the server, which may end a wait so much late."""
    slept: list[float] = []
    # Replace the module's name: all threads of the process share time.sleep itself.
    monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=slept.append))
    listener = Waits(FakeClock(), None)
    kept = Holder(None, None, "node", 1, since=0.0, expires_in=0.5, kind="min_hold")
    refusal = Held(kept, same_message=False, rank_us=7)
    line(listener, Duplicate()).wait(REQUEST, refusal, None, while_releasing=False)
    assert slept == [pytest.approx(SERVER_LATE)]
    assert listener.clock.now == pytest.approx(1000.0 + 0.5 + AFTER_EXPIRY - SERVER_LATE)


def test_process_that_has_woken_a_waiter_joins_the_line_for_a_moment() -> None:
    clock = FakeClock()
    recent = RecentWake(clock)
    assert not recent.joins_line(NAME)
    recent.note(NAME)
    assert recent.joins_line(NAME)
    assert not recent.joins_line(OTHER)
    clock.now += RECENT
    assert not recent.joins_line(NAME)


@pytest.mark.parametrize(("took", "joins"), [(AT_ONCE / 2, False), (AT_ONCE * 2, True)])
def test_caller_that_gets_its_own_wake_up_asks_at_once_the_next_time(took: float, joins: bool) -> None:
    """No other caller waits then, and a loop sends what it sends without waiters."""
    clock = FakeClock()
    recent = RecentWake(clock)
    recent.note(NAME)
    listener = Waits(clock, took)
    line(listener, Duplicate(), recent=recent).wait(REQUEST, None, None, while_releasing=False)
    recent.note(NAME)
    assert recent.joins_line(NAME) is joins
