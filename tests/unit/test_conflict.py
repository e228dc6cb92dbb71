"""decide(): the whole table."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from celery_dlock.conflict import Again, Drop, Fail, PutBack, Recall, Situation, Skip, Wait, decide
from celery_dlock.options import AFTER_WAIT, POLICIES, LockOptions
from celery_dlock.records import Duplicate, Held, Holder, Tombstoned, Unknown, Used

HOLDER = Holder("app.pay", "id9", "node7", 42, since=1_700_000_000.0, expires_in=500.0)
RIVAL, TWIN = Held(HOLDER, twin=False, rank_us=5), Held(HOLDER, twin=True, rank_us=5)
WHO = "held by app.pay[id9] on node7 since 2023-11-14T22:13:20.000+00:00"
EVERY_POLICY = [
    LockOptions(on_conflict=policy, after_wait=after)
    for policy, after in itertools.product(POLICIES, AFTER_WAIT)
    if policy == "wait" or after == "raise"
]
EVERY_SITUATION = [
    Situation(retries=retries, tries=count, comebacks=count, waited=waited, eager=eager)
    for retries, count, waited, eager in itertools.product((0, 2), (0, 3), (False, True), (False, True))
]


def options(policy: str, **more: Any) -> LockOptions:
    return LockOptions(on_conflict=policy, **more)


# A rival: the policy speaks


@pytest.mark.parametrize(
    ("policy", "after", "retries", "waited", "eager", "expected"),
    [
        # policy, after_wait, task's own retries, waited, eager -> decision
        ("skip", "raise", 0, False, False, Skip),
        ("skip", "raise", 2, False, False, Again),  # it ran before: its work is half done
        ("skip", "raise", 0, False, True, Skip),
        ("skip", "raise", 2, False, True, Skip),  # eager: nothing that could come back
        ("retry", "raise", 0, False, False, Again),
        ("retry", "raise", 2, False, False, Again),
        ("retry", "raise", 0, False, True, Fail),
        ("retry", "raise", 2, False, True, Fail),
        ("raise", "raise", 0, False, False, Fail),
        ("raise", "raise", 2, False, False, Fail),
        ("raise", "raise", 0, False, True, Fail),
        ("wait", "raise", 0, False, False, Wait),
        ("wait", "skip", 2, False, False, Wait),
        ("wait", "retry", 0, False, True, Wait),
        ("wait", "raise", 0, True, False, Fail),
        ("wait", "raise", 2, True, True, Fail),
        ("wait", "skip", 0, True, False, Skip),
        ("wait", "skip", 2, True, False, Again),
        ("wait", "skip", 2, True, True, Skip),
        ("wait", "retry", 0, True, False, Again),
        ("wait", "retry", 0, True, True, Fail),
    ],
)
def test_a_rival_meets_the_policy(
    policy: str, after: str, retries: int, waited: bool, eager: bool, expected: type
) -> None:
    situation = Situation(retries=retries, waited=waited, eager=eager)
    assert type(decide(RIVAL, options(policy, after_wait=after), situation)) is expected


@pytest.mark.parametrize("waiting", ["skip", "retry", "raise"])
def test_only_wait_looks_at_whether_it_has_waited(waiting: str) -> None:
    decisions = [decide(RIVAL, options(waiting), Situation(waited=waited)) for waited in (False, True)]
    assert decisions[0] == decisions[1]


def test_the_reason_says_who_holds_it_where_and_since_when() -> None:
    assert decide(RIVAL, options("skip"), Situation()) == Skip(WHO)
    assert decide(RIVAL, options("raise"), Situation()) == Fail(WHO)
    assert decide(RIVAL, options("retry"), Situation()) == Again(1.0, WHO)
    eager = decide(RIVAL, options("retry"), Situation(eager=True))
    assert isinstance(eager, Fail)
    assert eager.reason == f"{WHO}; an eager call has no message that could be retried"


def test_a_wait_is_as_long_as_its_option() -> None:
    assert decide(RIVAL, options("wait", wait_timeout=7.5), Situation()) == Wait(7.5, WHO)


# The policy `retry`


def test_the_delay_doubles_up_to_its_longest() -> None:
    chosen = options("retry", retry_delay=2, retry_delay_max=20)
    delays = []
    for tries in range(6):
        decision = decide(RIVAL, chosen, Situation(tries=tries))
        assert isinstance(decision, Again)
        delays.append(decision.delay)
    assert delays == [2, 4, 8, 16, 20, 20]


def test_the_upper_half_of_a_delay_is_jitter() -> None:
    for jitter, expected in [(0.0, 4.0), (0.5, 6.0), (1.0, 8.0)]:
        decision = decide(RIVAL, options("retry", retry_delay=2), Situation(tries=2, jitter=jitter))
        assert decision == Again(expected, WHO)


def test_any_number_of_tries_has_a_delay() -> None:
    for policy, conflict in (("retry", RIVAL), ("skip", TWIN)):
        decision = decide(conflict, options(policy), Situation(tries=100_000, comebacks=100_000))
        assert isinstance(decision, Again | PutBack)
        assert decision.delay == 60


@pytest.mark.parametrize(("tries", "expected"), [(0, Again), (2, Again), (3, Fail), (9, Fail)])
def test_a_limit_ends_the_tries_loudly(tries: int, expected: type) -> None:
    decision = decide(RIVAL, options("retry", retry_limit=3), Situation(tries=tries))
    assert type(decision) is expected
    if isinstance(decision, Fail):
        assert decision.reason == f"{WHO}; given up after {tries} tries (retry_limit)"


def test_comebacks_for_another_reason_are_no_tries() -> None:
    """A twin that was put back, a store that did not answer: neither the limit nor the delay counts them."""
    decision = decide(RIVAL, options("retry", retry_limit=1, retry_delay=2), Situation(comebacks=9))
    assert decision == Again(2.0, WHO)


def test_a_limit_of_zero_never_tries_again_and_none_always() -> None:
    assert isinstance(decide(RIVAL, options("retry", retry_limit=0), Situation()), Fail)
    assert isinstance(decide(RIVAL, options("retry", retry_limit=None), Situation(tries=10**6)), Again)


def test_a_conflict_never_uses_up_the_tasks_own_retries() -> None:
    """Its retries do not count as tries."""
    assert isinstance(decide(RIVAL, options("retry", retry_limit=3), Situation(retries=50)), Again)


# No rival: no policy is asked


@pytest.mark.parametrize("chosen", EVERY_POLICY, ids=lambda o: f"{o.on_conflict}-{o.after_wait}")
def test_a_twin_is_put_back_whatever_the_policy_and_the_situation(chosen: LockOptions) -> None:
    for situation in EVERY_SITUATION:
        decision = decide(TWIN, chosen, situation)
        assert decision == PutBack(2.0**situation.comebacks, "another copy of this message is running")


def test_a_twin_comes_back_with_growing_delay_but_not_long_after_the_lease_would_end() -> None:
    delays = [decide(TWIN, options("skip"), Situation(comebacks=count)) for count in range(8)]
    assert [d.delay for d in delays if isinstance(d, PutBack)] == [1, 2, 4, 8, 16, 32, 60, 60]
    ending = Held(Holder(None, None, "n", 1, since=1.0, expires_in=3.0), twin=True, rank_us=1)
    late = decide(ending, options("skip"), Situation(comebacks=6))
    assert isinstance(late, PutBack)
    assert 3.0 < late.delay <= 4.0


@pytest.mark.parametrize("chosen", EVERY_POLICY, ids=lambda o: f"{o.on_conflict}-{o.after_wait}")
def test_a_duplicate_is_dropped_and_a_used_name_is_skipped_whatever_the_policy_and_the_situation(
    chosen: LockOptions,
) -> None:
    for situation in EVERY_SITUATION:
        assert isinstance(decide(Duplicate(), chosen, situation), Drop)
        assert isinstance(decide(Used(HOLDER, same=True), chosen, situation), Drop)
        used = decide(Used(HOLDER, same=False), chosen, situation)
        assert used == Skip("already done by app.pay[id9] on node7 at 2023-11-14T22:13:20.000+00:00 (once_per)")


@pytest.mark.parametrize("policy", POLICIES)
def test_on_used_says_what_becomes_of_a_call_whose_name_is_used_whatever_the_policy(policy: str) -> None:
    reason = "already done by app.pay[id9] on node7 at 2023-11-14T22:13:20.000+00:00 (once_per)"
    expected = {"skip": Skip(reason), "return": Recall("id9", reason), "raise": Fail(reason, "used")}
    for on_used, decision in expected.items():
        chosen = options(policy, once_per=60, on_used=on_used)
        for situation in EVERY_SITUATION:
            assert decide(Used(HOLDER, same=False), chosen, situation) == decision
            assert isinstance(decide(Used(HOLDER, same=True), chosen, situation), Drop)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_unknown_outcome_fails_whatever_the_policy_and_says_who_died_and_what_to_do(policy: str) -> None:
    chosen = options(policy, once_per=60, after_crash="hold")
    for situation in EVERY_SITUATION:
        assert decide(Unknown(HOLDER), chosen, situation) == Fail(
            "nobody knows how far app.pay[id9] on node7 came, which began at 2023-11-14T22:13:20.000+00:00 and died "
            "(after_crash='hold'): settle it by the task's resolve(<its arguments>, sent=True or False)",
            "unknown",
        )


def test_a_tombstone_never_gets_here() -> None:
    with pytest.raises(AssertionError):
        decide(Tombstoned(), options("skip"), Situation())


def test_a_lock_without_a_task_is_named_by_its_process() -> None:
    holder = Holder(None, None, "node7", 42, since=0.0)
    decision = decide(Held(holder, twin=False, rank_us=1), options("skip"), Situation())
    assert decision == Skip("held by a Lock in process 42 on node7 since 1970-01-01T00:00:00.000+00:00")


def test_a_predecessor_that_is_about_to_release_is_no_rival_whatever_the_policy() -> None:
    left = Held(dataclasses.replace(HOLDER, task_id="mine", left=True), twin=False, rank_us=1)
    for policy in ("skip", "retry", "queue", "wait", "raise"):
        own = decide(left, LockOptions(on_conflict=policy), Situation(retries=1, task_id="mine", waited=True))
        assert isinstance(own, Again)
    assert isinstance(decide(left, LockOptions(on_conflict="raise"), Situation(retries=1, task_id="other")), Fail)
