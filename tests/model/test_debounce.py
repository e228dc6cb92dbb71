"""``debounce``, explored: it holds, each of its rules is needed, and the check can fail. See `debounce`."""

from typing import Any

import pytest

from tests.model.debounce import EVENTS, RULES, explore, setup_of


def slow(*rows: str) -> list[Any]:
    return [pytest.param(row, marks=pytest.mark.slow) for row in rows]


HOLDS = [
    "calls=3",
    "calls=2 crash=1",
    "calls=2 lost=1",
    "calls=2 redeliver=1",
    "calls=2 regrant=1",
    "calls=2 revoke=1",
    "calls=2 slow=1 eta=1",
    "calls=2 sent=1 eta=1",
    "calls=1 crash=1 redeliver=1",
]
WIDE = [
    "calls=1 crash=1 redeliver=1 regrant=1",
    "calls=2 crash=1 lost=1",
    "calls=2 crash=1 redeliver=1",
    "calls=2 regrant=1 revoke=1 lost=1",
    "calls=3 crash=1",
]

LONG = "it waits for too long"
OLDER = "an older call starts after a newer one"
NEWEST = "the newest call did not run"
NEEDED = [
    ("keep", "calls=2 crash=1", LONG),
    ("max", "calls=2", LONG),
    ("first", "calls=2", LONG),
    ("later", "calls=2 eta=1", "it does not wait until the calls have stopped"),
    ("older", "calls=2", OLDER),
    ("started", "calls=2", OLDER),
    ("itself", "calls=1 crash=1 redeliver=1", NEWEST),
    ("touch", "calls=2", "it does not wait until the calls have stopped"),
    ("over", "calls=2 crash=1", NEWEST),
    ("stay", "calls=2 crash=1", "a call that has its end starts"),
    ("due", "calls=2", LONG),
]


@pytest.mark.invariant("debounce-runs-the-newest-call")
@pytest.mark.timeout(300)  # all CPU, and a busy machine has little of it
@pytest.mark.parametrize("words", [*HOLDS, *slow(*WIDE)])
def test_each_burst_runs_its_newest_call(words: str) -> None:
    verdict = explore(setup_of(words))
    assert not verdict.fault, verdict.path
    assert verdict.ends


@pytest.mark.invariant("debounce-runs-the-newest-call")
@pytest.mark.parametrize(("rule", "words", "fault"), NEEDED)
def test_without_this_rule_a_fault_is_found(rule: str, words: str, fault: str) -> None:
    verdict = explore(setup_of(f"{words} without={rule}"))
    assert verdict.fault == fault
    assert verdict.path


def test_every_event_and_rule_is_explored() -> None:
    assert {event for event in EVENTS for words in HOLDS if f"{event}=" in words} == set(EVENTS)
    assert {rule for rule, _, _ in NEEDED} == RULES


def test_known_limit_newest_is_by_receipt_and_redelivery_counts_as_receipt() -> None:
    """A worker dies before it has parked a call. The broker delivers that call again, after a call sent later."""
    assert explore(setup_of("calls=2 sent=1 crash=1")).fault == NEWEST
