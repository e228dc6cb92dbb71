"""The hand-off protocol of the queue policy, explored: it holds, each of its rules is needed, and the check can fail.

What is too big for the suite runs as a script: see `explore`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.broker_and_workers import first
from tests.model.explore import Search, Verdict, overtaken, setup_of, wrong, wrong_end
from tests.model.protocol import waiting
from tests.model.state import EVENTS, FREE, LETTER, READY, RULES, TOO_MANY, Entry, Lock, State
from tests.model.symmetry import canonical


def slow(*rows: str) -> list[Any]:
    return [pytest.param(row, marks=pytest.mark.slow) for row in rows]


HOLDS = [
    # three messages
    "messages=3",
    "messages=3 requeue=1",
    "messages=3 lease=1",
    "messages=3 revoke=1 elsewhere=1",
    "messages=3 lock=1",
    "messages=3 early=1 elsewhere=1",
    # two messages, two kinds of events
    "crash=1 lease=1",
    "crash=1 revoke=1",
    "crash=1 elsewhere=1",
    "redeliver=1 regrant=1",
    "redeliver=1 revoke=1",
    "redeliver=1 lease=1",
    "regrant=1 revoke=1",
    "regrant=1 republish=1",
    "requeue=1 republish=1",
    "replace=1 requeue=1",
    "replace=1 revoke=1",
    # dead letters
    "regrant=2 tries=1 revoke=1",
    "messages=1 crash=2 tries=1",
    # early acknowledgement, and marks that are always set
    "early=1 crash=1 revoke=1",
    "early=1 replace=1",
    "messages=1 rare=0 crash=1 redeliver=1",
    # one message, many kinds of events
    "messages=1 redeliver=1 regrant=1 republish=1 lease=1 expiry=1",
    "messages=1 crash=1 redeliver=1 lock=1 elsewhere=1",
    # a store that does not answer
    "away=1 redeliver=1",
    "away=1 republish=1",
    "messages=1 away=2 redeliver=1 republish=1",
    "messages=1 away=1 redeliver=1 lease=1",
]

#: Those with the most states, far more than half of all.
WIDE = [
    "messages=3 crash=1",
    "messages=3 redeliver=1",
    "messages=3 regrant=1",
    "messages=3 overflow=1 redeliver=1",
    "messages=3 overflow=2 regrant=1",
    "crash=1 redeliver=1",
    "crash=1 requeue=1",
    "crash=1 lock=1",
    "redeliver=1 requeue=1",
    "redeliver=1 republish=1 expiry=1",
    "crash=1 regrant=1",
    "early=1 crash=1 lock=1",
    "early=1 redeliver=1 requeue=1",
    "rare=0 redeliver=1 republish=1",
    "messages=1 crash=1 regrant=1 requeue=1 lock=1 revoke=1",
    "messages=1 early=1 crash=1 redeliver=1 lock=1 revoke=1",
    "away=1 crash=1",
    "away=1 redeliver=1 republish=1",
]

LOST = "a message is lost"
TWICE = "a message that has its end starts, or gets another"
NEEDED = [
    ("final", "requeue=1", LOST),
    ("nest", "replace=1", LOST),
    ("gen", "redeliver=1", TWICE),
    ("zrem", "lease=1 redeliver=1", "a finished identity waits"),
    ("stale", "lease=1 redeliver=1", TWICE),
    ("end", "revoke=1", TWICE),
    ("end", "messages=3 overflow=1 redeliver=1", TWICE),
    ("clear", "requeue=1 republish=1", LOST),
    ("turn", "messages=1 lock=1 elsewhere=1 redeliver=1 crash=1", LOST),
    ("copy", "revoke=1 redeliver=1", TWICE),
    ("copy", "messages=3 overflow=1 redeliver=1", TWICE),
    ("ahead", "crash=1", "an elder is overtaken"),
    ("rank", "messages=3", "an elder is overtaken"),
    ("hold", "early=1 crash=1", LOST),
    ("due", "crash=1", LOST),
    ("due", "lock=1 elsewhere=1", LOST),
    ("claim", "lock=1 elsewhere=1 tries=1", "a dead letter that was not lost"),
    ("first", "messages=1 away=1 redeliver=1", TWICE),
]


def explored(words: str) -> Verdict:
    return Search(setup_of(words.split())).explore()


@pytest.mark.invariant("queue-protocol-is-explored")
@pytest.mark.timeout(300)  # all CPU, and a busy machine has little of it
@pytest.mark.parametrize("words", [*HOLDS, *slow(*WIDE)])
def test_the_protocol_holds(words: str) -> None:
    verdict = explored(words)
    assert not verdict.fault, verdict.path
    assert verdict.ends


def test_every_event_and_rule_is_tried() -> None:
    assert {event for event in EVENTS for words in HOLDS if f"{event}=1" in words} == set(EVENTS)
    assert {rule for rule, _, _ in NEEDED} == RULES


@pytest.mark.invariant("queue-protocol-is-explored")
@pytest.mark.parametrize(("rule", "words", "fault"), NEEDED)
def test_without_this_rule_the_check_finds_a_fault(rule: str, words: str, fault: str) -> None:
    verdict = explored(f"{words} without={rule}")
    assert verdict.fault.startswith(fault)
    assert verdict.path


def test_a_counter_example_is_a_shortest_way_with_the_same_names_all_along() -> None:
    assert explored("messages=1 requeue=1 rare=0 without=final").path == (
        "deliver f0", "0 acquires", "0 unwinds", "0 leaves (unwound)", "deliver r0", "0 is done: not run",
    )  # fmt: skip


def test_known_limit_reused_id_that_dies_before_its_first_script_meets_the_old_mark() -> None:
    verdict = explored("crash=1 republish=1")
    assert verdict.fault == LOST
    assert verdict.path[-3:] == ("1 crashes in begin", "deliver r1", "1 is done: not run")


def test_marks_that_are_rare_cost_nothing_but_that_limit() -> None:
    assert not explored("messages=1 crash=1 republish=1").fault  # it ran without a copy, so it left no mark
    assert explored("messages=1 crash=1 republish=1 rare=0").fault == LOST


@pytest.mark.parametrize(
    "words", ["crash=1", "replace=1", "redeliver=1", *slow("requeue=1 regrant=1", "revoke=1 lock=1")]
)
def test_states_that_are_taken_for_one_behave_alike(words: str) -> None:
    """Whatever the reduction leaves out has an equal among what it keeps, and nothing is added."""
    setup = setup_of(words.split())
    full, reduced = Search(setup, reduced=False), Search(setup)
    assert full.explore().fault == reduced.explore().fault == ""
    assert {canonical(s, setup) for s in full.states} == {canonical(s, setup) for s in reduced.states}
    assert len(reduced.states) < 0.7 * len(full.states)


# The properties themselves: each can fail


def a_state(words: str = "messages=3", **more: object) -> State:
    at_rest = first(setup_of(words.split()))._replace(broker=(), need=(0, 0, 0))
    return at_rest._replace(**more)  # type: ignore[arg-type]  # a field's value, whichever it is


def test_what_must_be_true_in_every_state_can_be_false() -> None:
    setup = setup_of(["messages=3"])
    waits = (Entry(5, 0, READY), None, None)
    assert not wrong(a_state(), setup)
    assert wrong(a_state(need=(0, TOO_MANY, 0)), setup) == TWICE
    assert wrong(a_state(entries=waits, done=(5, -1, -1)), setup) == "a finished identity waits"
    assert not wrong(a_state(entries=waits, done=(4, -1, -1)), setup)


def test_what_must_be_true_at_rest_can_be_false() -> None:
    setup = setup_of(["messages=3"])
    waits, letter = (Entry(5, 0, READY), None, None), (Entry(5, 2, LETTER), None, None)
    assert not wrong_end(a_state(), setup)
    assert wrong_end(a_state(need=(0, 1, 0)), setup) == LOST
    assert wrong_end(a_state(lock=Lock("dead", 1, word=False)), setup) == "the lock is stuck"
    assert wrong_end(a_state(entries=waits), setup) == "somebody waits for ever"
    assert wrong_end(a_state(entries=letter), setup) == "a dead letter that was not lost"


def test_a_state_from_which_there_is_no_way_to_rest_is_seen() -> None:
    search = Search(setup_of(["messages=1"]))
    assert not search.explore().fault
    assert search.unreached() is None
    search.ends.clear()
    assert search.unreached() == next(iter(search.states))


def test_who_is_granted_past_an_elder_is_seen() -> None:
    both = (Entry(1, 0, READY), Entry(2, 0, READY), None)
    before = a_state(entries=both, lock=FREE)
    assert [m for _, m in waiting(before, setup_of([]))] == [0, 1]
    assert not overtaken(before, a_state(entries=both, lock=Lock("grant", 0, word=True)))
    assert overtaken(before, a_state(entries=both, lock=Lock("grant", 1, word=True)))
