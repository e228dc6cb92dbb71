"""``on_conflict="replace"``, explored: the design holds, each rule is needed, and the check can fail. See `replace`."""

import pytest

from tests.model.replace import EVENTS, RULES, explore, setup_of

HOLDS = [
    "calls=3",
    "calls=2 crash=1 lost=1",
    "calls=2 kill=1 crash=1",
    "calls=2 kill=1 deaf=1 lost=1",
    "calls=3 kill=1",
]
WIDE = ["calls=3 crash=1", "calls=3 kill=1 lost=1"]

NEEDED = [
    ("own", "calls=2", "a body is stopped although no newer call waits"),
    ("mark", "calls=2 kill=1", "a call that has its end starts"),
    ("look", "calls=2 crash=1", "a call has two ends"),
    ("older", "calls=2", "the newest call did not run"),
    ("over", "calls=3 crash=1", "a call is lost"),
    ("late", "calls=3", "a call starts although a newer one waits"),
    ("left", "calls=2", "a body is stopped although none has ended for long"),
]


@pytest.mark.invariant("newest-call-stops-the-running-one")
@pytest.mark.timeout(300)  # all CPU, and a busy machine has little of it
@pytest.mark.parametrize("words", [*HOLDS, *(pytest.param(words, marks=pytest.mark.slow) for words in WIDE)])
def test_newest_call_runs_and_replaced_ones_end_revoked(words: str) -> None:
    verdict = explore(setup_of(words))
    assert not verdict.fault, verdict.path
    assert verdict.ends


@pytest.mark.invariant("newest-call-stops-the-running-one")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rule", "words", "fault"), NEEDED)
def test_without_this_rule_a_fault_is_found(rule: str, words: str, fault: str) -> None:
    verdict = explore(setup_of(f"{words} without={rule}"))
    assert verdict.fault == fault
    assert verdict.path


def test_every_event_and_rule_is_explored() -> None:
    assert {event for event in EVENTS for words in HOLDS if f"{event}=" in words} == set(EVENTS)
    assert {rule for rule, _, _ in NEEDED} == RULES
