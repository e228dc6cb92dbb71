"""The breaker: a store that did not answer in time is asked by one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from celery_dlock.errors import ReplyLost, ReplyTimeout, StoreNotReady, StoreRefused, StoreUnavailable
from celery_dlock.store.circuit_breaker import CircuitBreaker, ShardStates, shared_states
from celery_dlock.utils.clock import SystemClock
from tests.unit.fakes import FakeClock

BREAKER_RESET, TIMEOUT = 2.0, 3.0


class Harness:
    """One store, and a breaker for each of two processes."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.states = ShardStates([0], [0])
        self.here, self.there = (CircuitBreaker(self.states, self.clock, BREAKER_RESET, TIMEOUT) for _ in range(2))

    def fail(self, breaker: CircuitBreaker, error: StoreUnavailable, after: float = TIMEOUT) -> None:
        """A command that takes so long and fails so."""

        def command() -> None:
            self.clock.now += after
            raise error

        with pytest.raises(type(error)):
            breaker.call(command)

    def answer(self, breaker: CircuitBreaker) -> None:
        assert breaker.call(lambda: "yes") == "yes"


@pytest.fixture
def harness() -> Harness:
    return Harness()


def refused(breaker: CircuitBreaker) -> str:
    with pytest.raises(StoreUnavailable) as raised:
        breaker.before_call()
    return str(raised.value)


@pytest.mark.invariant("dead-store-costs-one-timeout")
@pytest.mark.parametrize("error", [ReplyTimeout("late"), StoreUnavailable("no connection")])
def test_after_one_timeout_nobody_asks_for_a_rest(harness: Harness, error: StoreUnavailable) -> None:
    harness.here.before_call()
    harness.fail(harness.here, error)
    for breaker in (harness.here, harness.there):
        assert refused(breaker) == "the lock store was not asked: it did not answer 0.0 s ago"
    harness.clock.now += BREAKER_RESET - 0.1
    assert refused(harness.there).endswith("1.9 s ago")


@pytest.mark.invariant("dead-store-costs-one-timeout")
def test_after_the_rest_one_asker_tries_and_the_others_are_refused(harness: Harness) -> None:
    harness.fail(harness.here, ReplyTimeout("late"))
    harness.clock.now += BREAKER_RESET
    harness.there.before_call()
    refused(harness.here)
    refused(harness.there)


def test_an_answer_to_the_one_who_tries_lets_all_ask_again(harness: Harness) -> None:
    harness.fail(harness.here, ReplyTimeout("late"))
    harness.clock.now += BREAKER_RESET
    harness.there.before_call()
    harness.answer(harness.there)
    for breaker in (harness.here, harness.there) * 3:
        breaker.before_call()


def test_another_failure_of_the_one_who_tries_is_another_rest(harness: Harness) -> None:
    harness.fail(harness.here, ReplyTimeout("late"))
    harness.clock.now += BREAKER_RESET
    harness.there.before_call()
    harness.fail(harness.there, ReplyTimeout("late"))
    harness.clock.now += BREAKER_RESET - 0.1
    refused(harness.here)
    harness.clock.now += 0.1
    harness.here.before_call()


def test_one_who_dies_while_it_tries_holds_the_others_up_for_two_timeouts_at_most(harness: Harness) -> None:
    harness.fail(harness.here, ReplyTimeout("late"))
    harness.clock.now += BREAKER_RESET
    harness.there.before_call()
    harness.clock.now += 2 * TIMEOUT - 0.1
    refused(harness.here)
    harness.clock.now += 0.1
    harness.here.before_call()


@pytest.mark.parametrize("error", [StoreRefused("NOPERM"), StoreNotReady("LOADING"), ReplyLost("cut")])
def test_an_answer_that_is_no_and_a_connection_that_was_cut_do_not_open_it(
    harness: Harness, error: StoreUnavailable
) -> None:
    harness.fail(harness.here, error)
    harness.here.before_call()


def test_what_fails_at_once_costs_nothing_and_is_asked_by_all(harness: Harness) -> None:
    """A server that is being restarted: a lock is taken as soon as it is back."""
    for _ in range(3):
        harness.fail(harness.here, StoreUnavailable("connection refused"), after=0.05)
        harness.there.before_call()


def test_what_fails_at_once_while_it_rests_lets_all_ask_again(harness: Harness) -> None:
    harness.fail(harness.here, ReplyTimeout("late"))
    harness.clock.now += BREAKER_RESET
    harness.fail(harness.here, StoreUnavailable("connection refused"), after=0.05)
    harness.there.before_call()


def test_an_answer_that_was_wanted_much_sooner_than_the_timeout_says_nothing(harness: Harness) -> None:
    """A lease that is about to end cannot wait; others can."""
    harness.fail(harness.here, ReplyTimeout("late"), after=TIMEOUT / 2 - 0.1)
    harness.here.before_call()


@pytest.mark.parametrize("timeout", [0.05, 60.0])
def test_a_timeout_opens_it_however_short_or_long_it_is(timeout: float) -> None:
    harness = Harness()
    breaker = CircuitBreaker(harness.states, harness.clock, BREAKER_RESET, timeout)
    harness.fail(breaker, ReplyTimeout("late"), after=timeout)
    refused(breaker)


def test_without_a_rest_it_never_opens(harness: Harness) -> None:
    breaker = CircuitBreaker(harness.states, harness.clock, 0.0, TIMEOUT)
    harness.fail(breaker, ReplyTimeout("late"))
    breaker.before_call()


def test_no_other_error_says_anything_about_the_store(harness: Harness) -> None:
    def interrupted() -> None:
        harness.clock.now += TIMEOUT
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harness.here.call(interrupted)
    harness.here.before_call()


def test_what_one_process_finds_out_all_that_share_its_memory_know() -> None:
    states = shared_states()
    breaker = CircuitBreaker(states, SystemClock(), 60.0, 0.05)

    def fail() -> None:
        end = breaker._clock.monotonic() + 0.05
        while breaker._clock.monotonic() < end:
            pass
        raise ReplyTimeout("late")

    def in_a_fork(call: Callable[[], object]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                call()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    in_a_fork(lambda: breaker.call(fail))
    assert refused(breaker).startswith("the lock store was not asked: ")
    in_a_fork(lambda: breaker.call(lambda: None))
    breaker.before_call()
