"""``limit=N``, explored: the design holds, each of its rules is needed, and the check can fail. See `limit`."""

import pytest

from tests.model.limit import EVENTS, RULES, explore, setup_of

HOLDS = [
    "calls=3",
    pytest.param("calls=4", marks=pytest.mark.slow),
    "calls=3 again=1",
    "calls=3 crash=1",
    "calls=3 redeliver=1",
    "calls=3 limit=1 grown=1",
    "calls=2 limit=1 grown=1 redeliver=1 shrunk=1",
    "calls=2 limit=1 grown=1 shrunk=1 crash=1",
    pytest.param("calls=3 limit=1 grown=1 shrunk=1 crash=1", marks=pytest.mark.slow),
]

IDLE = "a seat is idle while a call waits"
NEEDED = [
    ("own", "calls=3 again=1", "a call is lost"),
    ("every", "calls=2 limit=1 grown=1 redeliver=1 shrunk=1", "one message runs twice at once"),
    ("stored", "calls=2 limit=1 grown=1 redeliver=1 shrunk=1", IDLE),
    ("grow", "calls=3 limit=1 grown=1", IDLE),
]


@pytest.mark.timeout(300)  # all CPU, and a busy machine has little of it
@pytest.mark.parametrize("words", HOLDS)
def test_no_seat_is_taken_twice_or_idle_while_a_call_waits(words: str) -> None:
    verdict = explore(setup_of(words))
    assert not verdict.fault, verdict.path
    assert verdict.ends


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rule", "words", "fault"), NEEDED)
def test_without_this_rule_a_fault_is_found(rule: str, words: str, fault: str) -> None:
    verdict = explore(setup_of(f"{words} without={rule}"))
    assert verdict.fault == fault
    assert verdict.path


def test_every_event_and_rule_is_explored() -> None:
    assert {event for event in EVENTS for words in HOLDS if f"{event}=" in str(words)} == set(EVENTS)
    assert {rule for rule, _, _ in NEEDED} == RULES
