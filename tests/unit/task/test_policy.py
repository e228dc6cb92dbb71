"""decide(): the whole table."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from celery_dlock.options.lock_options import LockOptions
from celery_dlock.options.values import POLICIES
from celery_dlock.store.holder_model import Holder
from celery_dlock.store.model import Duplicate, Held, Queued, Tombstoned, Unknown, Used
from celery_dlock.task.policy import (
    ConflictContext,
    DropDuplicate,
    Fail,
    Park,
    ParkDuplicate,
    RequeueDuplicate,
    RetryLater,
    ReturnFirstResult,
    Skip,
    Wait,
    decide,
)

HOLDER = Holder("app.pay", "id9", "node7", 42, since=1_700_000_000.0, expires_in=500.0)
RIVAL, DUPLICATE = Held(HOLDER, same_message=False, rank_us=5), Held(HOLDER, same_message=True, rank_us=5)
WHO = "held by app.pay[id9] on node7 since 2023-11-14T22:13:20.000+00:00"
#: The policies that a task with ``once_per`` may have.
ONCE_POLICIES = [policy for policy in POLICIES if policy != "replace"]
EVERY_POLICY = [LockOptions(on_conflict=policy, wait=wait) for policy, wait in itertools.product(POLICIES, (0, 5))]
EVERY_SITUATION = [
    ConflictContext(retries=retries, conflict_retries=count, store_retries=count, waited=waited, eager=eager)
    for retries, count, waited, eager in itertools.product((0, 2), (0, 3), (False, True), (False, True))
]


def options(policy: str, **more: Any) -> LockOptions:
    return LockOptions(on_conflict=policy, **more)


# A rival: the policy speaks


@pytest.mark.invariant("conflict-is-a-value")
@pytest.mark.parametrize(
    ("policy", "wait", "retries", "waited", "eager", "expected"),
    [
        # policy, wait, task's own retries, waited, eager -> decision
        ("skip", 0, 0, False, False, Skip),
        ("skip", 0, 2, False, False, RetryLater),  # it ran before: its work is half done
        ("skip", 0, 0, False, True, Skip),
        ("skip", 0, 2, False, True, Skip),  # an eager call cannot be republished
        ("retry", 0, 0, False, False, RetryLater),
        ("retry", 0, 2, False, False, RetryLater),
        ("retry", 0, 0, False, True, Fail),
        ("retry", 0, 2, False, True, Fail),
        ("raise", 0, 0, False, False, Fail),
        ("raise", 0, 2, False, False, Fail),
        ("raise", 0, 0, False, True, Fail),
        ("raise", 5, 0, False, False, Wait),
        ("skip", 5, 2, False, False, Wait),
        ("retry", 5, 0, False, True, Wait),
        ("raise", 5, 0, True, False, Fail),
        ("raise", 5, 2, True, True, Fail),
        ("skip", 5, 0, True, False, Skip),
        ("skip", 5, 2, True, False, RetryLater),
        ("skip", 5, 2, True, True, Skip),
        ("retry", 5, 0, True, False, RetryLater),
        ("retry", 5, 0, True, True, Fail),
    ],
)
def test_held_lock_is_decided_by_the_policy(
    policy: str, wait: float, retries: int, waited: bool, eager: bool, expected: type
) -> None:
    situation = ConflictContext(retries=retries, waited=waited, eager=eager)
    assert type(decide(RIVAL, options(policy, wait=wait), situation)) is expected


def test_reason_names_holder_node_and_start() -> None:
    assert decide(RIVAL, options("skip"), ConflictContext()) == Skip(WHO)
    assert decide(RIVAL, options("raise"), ConflictContext()) == Fail(WHO)
    assert decide(RIVAL, options("retry"), ConflictContext()) == RetryLater(1.0, WHO)
    eager = decide(RIVAL, options("retry"), ConflictContext(eager=True))
    assert isinstance(eager, Fail)
    assert eager.reason == f"{WHO}; an eager call has no message to retry"


@pytest.mark.parametrize("policy", POLICIES)
def test_wait_comes_before_every_policy_and_lasts_its_time(policy: str) -> None:
    answer = Queued(0, 5, HOLDER) if policy in ("queue", "replace") else RIVAL
    assert decide(answer, options(policy, wait=7.5), ConflictContext()) == Wait(7.5, WHO)


@pytest.mark.parametrize("policy", ["queue", "replace"])
@pytest.mark.parametrize("answer", [Queued(1, 5, HOLDER), Queued(1, 5, None)])
def test_call_is_parked_at_once_if_waiters_come_before_it(policy: str, answer: Queued) -> None:
    assert isinstance(decide(answer, options(policy, wait=7.5), ConflictContext()), Park)


@pytest.mark.parametrize(
    ("policy", "expected"), [("raise", Fail), ("skip", Skip), ("retry", RetryLater), ("queue", Park), ("replace", Park)]
)
def test_reason_after_a_wait_says_how_long_the_call_waited(policy: str, expected: type) -> None:
    answer = Queued(0, 5, HOLDER) if policy in ("queue", "replace") else RIVAL
    decision = decide(answer, options(policy, wait=7.5), ConflictContext(waited=True))
    assert type(decision) is expected
    assert decision.reason == f"{WHO}; waited 7.5 s (wait)"


# The policy `retry`


def test_the_delay_doubles_up_to_its_longest() -> None:
    chosen = options("retry", retry_delay=2, retry_delay_max=20)
    delays = []
    for tries in range(6):
        decision = decide(RIVAL, chosen, ConflictContext(conflict_retries=tries))
        assert isinstance(decision, RetryLater)
        delays.append(decision.delay)
    assert delays == [2, 4, 8, 16, 20, 20]


def test_the_upper_half_of_a_delay_is_jitter() -> None:
    for jitter, expected in [(0.0, 4.0), (0.5, 6.0), (1.0, 8.0)]:
        decision = decide(RIVAL, options("retry", retry_delay=2), ConflictContext(conflict_retries=2, jitter=jitter))
        assert decision == RetryLater(expected, WHO)


def test_any_number_of_tries_has_a_delay() -> None:
    for policy, conflict in (("retry", RIVAL), ("skip", DUPLICATE)):
        decision = decide(conflict, options(policy), ConflictContext(conflict_retries=100_000, store_retries=100_000))
        assert isinstance(decision, RetryLater | RequeueDuplicate)
        assert decision.delay == 60


@pytest.mark.parametrize(("tries", "expected"), [(0, RetryLater), (2, RetryLater), (3, Fail), (9, Fail)])
def test_retry_limit_reached_fails_the_call(tries: int, expected: type) -> None:
    decision = decide(RIVAL, options("retry", retry_limit=3), ConflictContext(conflict_retries=tries))
    assert type(decision) is expected
    if isinstance(decision, Fail):
        assert decision.reason == f"{WHO}; given up after {tries} tries (retry_limit)"


def test_store_retries_do_not_count_for_retry_limit() -> None:
    """Requeued duplicates and store errors count neither for the limit nor for the delay."""
    decision = decide(RIVAL, options("retry", retry_limit=1, retry_delay=2), ConflictContext(store_retries=9))
    assert decision == RetryLater(2.0, WHO)


def test_retry_limit_zero_never_retries_and_none_always_does() -> None:
    assert isinstance(decide(RIVAL, options("retry", retry_limit=0), ConflictContext()), Fail)
    assert isinstance(
        decide(RIVAL, options("retry", retry_limit=None), ConflictContext(conflict_retries=10**6)), RetryLater
    )


def test_a_conflict_never_uses_up_the_tasks_own_retries() -> None:
    """Its retries do not count as tries."""
    assert isinstance(decide(RIVAL, options("retry", retry_limit=3), ConflictContext(retries=50)), RetryLater)


# No rival: no policy is asked


@pytest.mark.parametrize("chosen", EVERY_POLICY, ids=lambda o: f"{o.on_conflict}-{o.wait:g}")
def test_duplicate_delivery_is_requeued_under_every_policy(chosen: LockOptions) -> None:
    for situation in EVERY_SITUATION:
        decision = decide(DUPLICATE, chosen, situation)
        if isinstance(decision, ParkDuplicate):  # tests/unit/task/test_queue_policy.py
            assert chosen.on_conflict == "queue"
            decision = decision.otherwise
        assert decision == RequeueDuplicate(2.0**situation.store_retries, "another delivery of this message is running")


def test_duplicate_delivery_is_retried_with_growing_delay_until_the_lease_ends() -> None:
    delays = [decide(DUPLICATE, options("skip"), ConflictContext(store_retries=count)) for count in range(8)]
    assert [d.delay for d in delays if isinstance(d, RequeueDuplicate)] == [1, 2, 4, 8, 16, 32, 60, 60]
    ending = Held(Holder(None, None, "n", 1, since=1.0, expires_in=3.0), same_message=True, rank_us=1)
    late = decide(ending, options("skip"), ConflictContext(store_retries=6))
    assert isinstance(late, RequeueDuplicate)
    assert 3.0 < late.delay <= 4.0


@pytest.mark.parametrize("chosen", EVERY_POLICY, ids=lambda o: f"{o.on_conflict}-{o.wait:g}")
def test_duplicate_is_dropped_and_used_name_is_skipped_under_every_policy(
    chosen: LockOptions,
) -> None:
    for situation in EVERY_SITUATION:
        assert isinstance(decide(Duplicate(), chosen, situation), DropDuplicate)
        assert isinstance(decide(Used(HOLDER, same_message=True), chosen, situation), DropDuplicate)
        used = decide(Used(HOLDER, same_message=False), chosen, situation)
        assert used == Skip("already done by app.pay[id9] on node7 at 2023-11-14T22:13:20.000+00:00 (once_per)")


@pytest.mark.parametrize("policy", ONCE_POLICIES)
def test_on_used_decides_a_used_name_under_every_policy(policy: str) -> None:
    reason = "already done by app.pay[id9] on node7 at 2023-11-14T22:13:20.000+00:00 (once_per)"
    expected = {"skip": Skip(reason), "return": ReturnFirstResult("id9", reason), "raise": Fail(reason, "used")}
    for on_used, decision in expected.items():
        chosen = options(policy, once_per=60, on_used=on_used)
        for situation in EVERY_SITUATION:
            assert decide(Used(HOLDER, same_message=False), chosen, situation) == decision
            assert isinstance(decide(Used(HOLDER, same_message=True), chosen, situation), DropDuplicate)


@pytest.mark.parametrize("policy", ONCE_POLICIES)
def test_message_of_a_run_that_died_with_its_result_stores_an_end_of_its_own(policy: str) -> None:
    """There is no result that ``on_used="return"`` could return."""
    reason = "already done by app.pay[id9] on node7 at 2023-11-14T22:13:20.000+00:00 (once_per)"
    expected = {"skip": Skip(reason), "return": Skip(reason), "raise": Fail(reason, "used")}
    for on_used, decision in expected.items():
        chosen = options(policy, once_per=60, on_used=on_used)
        for situation in EVERY_SITUATION:
            assert decide(Used(HOLDER, same_message=True, result_stored=False), chosen, situation) == decision


@pytest.mark.parametrize("policy", ONCE_POLICIES)
def test_unknown_outcome_fails_under_every_policy_and_names_process_and_remedy(policy: str) -> None:
    chosen = options(policy, once_per=60, after_crash="hold")
    for situation in EVERY_SITUATION:
        assert decide(Unknown(HOLDER), chosen, situation) == Fail(
            "outcome unknown: app.pay[id9] on node7 started at 2023-11-14T22:13:20.000+00:00 and its process died "
            "(after_crash='hold'). Call app.pay.resolve(<arguments>, sent=True) if it did its work, sent=False if not",
            "unknown",
        )


def test_tombstoned_answer_is_never_decided() -> None:
    with pytest.raises(AssertionError):
        decide(Tombstoned(), options("skip"), ConflictContext())


def test_a_lock_without_a_task_is_named_by_its_process() -> None:
    holder = Holder(None, None, "node7", 42, since=0.0)
    decision = decide(Held(holder, same_message=False, rank_us=1), options("skip"), ConflictContext())
    assert decision == Skip("held by a Lock in process 42 on node7 since 1970-01-01T00:00:00.000+00:00")


ENDED = Held(dataclasses.replace(HOLDER, releasing=True), same_message=False, rank_us=1)


@pytest.mark.invariant("finished-holder-is-no-conflict")
@pytest.mark.parametrize("chosen", EVERY_POLICY, ids=lambda o: f"{o.on_conflict}-{o.wait:g}")
@pytest.mark.parametrize("task_id", ["id9", "other"])
def test_holder_whose_body_has_ended_is_waited_for_under_every_policy(chosen: LockOptions, task_id: str) -> None:
    """The call may be the holder's own retry, its chain's next step or another one. A wait in the slot comes first."""
    for situation in EVERY_SITUATION:
        decision = decide(ENDED, chosen, dataclasses.replace(situation, task_id=task_id))
        if chosen.wait and not situation.waited:
            assert isinstance(decision, Wait)
        elif not situation.eager:
            delay = min(60.0, 2.0**situation.store_retries)
            assert decision == RetryLater(delay, f"{WHO}, whose body has ended", counts=False)
        else:
            assert decision == decide(RIVAL, chosen, situation)


@pytest.mark.parametrize(("left", "expected"), [(True, RetryLater), (False, Fail)])
def test_own_earlier_run_still_in_its_body_meets_the_policy(left: bool, expected: type) -> None:
    held = Held(dataclasses.replace(HOLDER, task_id="mine", releasing=left), same_message=False, rank_us=1)
    situation = ConflictContext(retries=1, task_id="mine", conflict_retries=3, waited=True)
    for chosen in (options("raise"), options("raise", wait=5), options("retry", retry_limit=3)):
        assert isinstance(decide(held, chosen, situation), expected)
