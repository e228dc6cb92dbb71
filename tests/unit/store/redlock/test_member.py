"""One server of a Redlock: what it says of an acquisition whose connection was cut."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dlock.errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreQuarantined, StoreUnavailable
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, AcquireRequest, Released, Requester
from celery_dlock.store.redlock.member import MemberServer
from tests.unit.fakes import FakeClock, a_name

NAME = a_name()
WON = Acquired(1, 1.0, 1)


class ScriptedStore:
    """Answers each acquire with the next of some answers; errors are raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.endings: list[ReleaseRequest] = []

    def acquire(self, *_: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released:
        self.endings.append(ending)
        return Released(ours=True, duplicate_seen=False)


def acquire(*answers: Any) -> tuple[Any, MemberServer, ScriptedStore]:
    """The outcome, an exception as a value, and what is left."""
    store: Any = ScriptedStore(*answers)
    node = MemberServer(store, "redis://h", FakeClock(), 1.0)
    node.expect_acquire("o.1")
    outcome: Any
    try:
        outcome = node.acquire(
            NAME, "o.1", 1_000, AcquireRequest(Requester("", "", "", "")), ReleaseRequest(outcome_unknown=True)
        )
    except StoreUnavailable as error:
        outcome = error
    assert store.answers == []
    return outcome, node, store


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (StoreUnavailable("refused"), ReplyLost),
        (StoreNotReady("LOADING"), ReplyLost),
        (ReplyLost("cut again"), ReplyLost),
        (ReplyTimeout("hangs"), ReplyTimeout),
        (StoreQuarantined("new", 3.0), StoreQuarantined),
    ],
)
def test_acquire_whose_second_try_fails_stays_unsure(second: Exception, kind: type[Exception]) -> None:
    outcome, node, store = acquire(ReplyLost("cut"), second)
    assert type(outcome) is kind
    assert str(second) in str(outcome)
    node.release(NAME, "o.1", ReleaseRequest())
    assert store.endings == [ReleaseRequest(outcome_unknown=True)]


def test_acquire_after_a_cut_is_released_with_a_tombstone() -> None:
    outcome, node, store = acquire(ReplyLost("cut"), WON)
    assert outcome == WON
    node.release(NAME, "o.1", ReleaseRequest())
    assert store.endings == [ReleaseRequest(outcome_unknown=True)]


def test_acquire_that_is_answered_at_once_is_released_without_a_tombstone() -> None:
    outcome, node, store = acquire(WON)
    assert outcome == WON
    node.release(NAME, "o.1", ReleaseRequest())
    assert store.endings == [ReleaseRequest()]


def test_acquire_that_hangs_is_not_sent_again() -> None:
    outcome, _, _ = acquire(ReplyTimeout("hangs"))
    assert type(outcome) is ReplyTimeout
