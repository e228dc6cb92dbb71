"""One wake-up per release, explored: none is lost, each rule is needed, and the check can fail. See `wakeups`."""

import pytest

from tests.model.wakeups import EVENTS, POLLED, RULES, explore, setup_of

HOLDS = [
    "waiters=3",
    "waiters=3 barge=2",
    "waiters=3 die=1 barge=1",
    "waiters=3 die=2",
    "waiters=3 expire=1 die=1",
    "waiters=3 leave=1 barge=1",
    "waiters=3 interrupt=1 barge=1",
    "waiters=3 cut=2 barge=1",
    "waiters=3 refuse=1 barge=1",
    "waiters=3 keep=1 leave=1 barge=1",
    "waiters=3 successor=1 leave=1 barge=1",
    "waiters=3 keep=1 die=1 interrupt=1",
    "waiters=2 leave=1 interrupt=1 cut=1 refuse=1 barge=1 keep=1 successor=1",
    "waiters=2 die=1 expire=1 leave=1 interrupt=1 cut=1 barge=1 keep=1",
]

LOST = "a wake-up is lost"
NEEDED = [
    ("mark", "waiters=1", LOST),
    ("carry", "waiters=2", LOST),
    ("list", "waiters=1", LOST),
    ("one", "waiters=2 barge=1", "the list grows"),
    ("pass", "waiters=2 interrupt=1", LOST),
    ("pass", "waiters=2 refuse=1", LOST),
    ("pass", "waiters=2 keep=1 leave=1", LOST),
    ("look", "waiters=1 cut=1", LOST),
    ("kept", "waiters=1 keep=1", LOST),
    ("inherit", "waiters=1 successor=1", LOST),
]


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.parametrize("words", HOLDS)
def test_each_wake_up_is_used_or_costs_one_slow_poll(words: str) -> None:
    """Of these events, only a death or an expiry of the list may cost a slow poll, and one each."""
    verdict = explore(setup_of(words))
    assert not verdict.fault, verdict.path
    assert verdict.ends


@pytest.mark.invariant("no-wake-up-is-lost")
@pytest.mark.parametrize(("rule", "words", "fault"), NEEDED)
def test_without_this_rule_a_fault_is_found(rule: str, words: str, fault: str) -> None:
    assert not explore(setup_of(words)).fault
    verdict = explore(setup_of(f"{words} without={rule}"))
    assert verdict.fault == fault
    assert verdict.path


def test_every_event_and_rule_is_explored() -> None:
    assert {event for event in EVENTS for words in HOLDS if f"{event}=" in words} == set(EVENTS)
    assert {rule for rule, _, _ in NEEDED} == RULES


def test_death_of_a_woken_waiter_costs_one_slow_poll() -> None:
    """The check would be empty if the slow poll were never needed."""
    assert POLLED == ("die", "expire")
    setup = setup_of("waiters=2 die=1")
    assert not explore(setup).fault
    verdict = explore(setup_of("waiters=3 barge=1 without=carry"))
    assert verdict.path[-1].endswith("polls")
