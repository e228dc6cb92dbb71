"""One slow answer for many requests."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_dlock.web.shared import Shared
from tests.support.polling import eventually


class Slow:
    """A function that waits until it may answer, with the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.go_on = threading.Event()

    def __call__(self) -> int:
        self.calls += 1
        assert self.go_on.wait(20)
        return self.calls


def test_requests_at_the_same_time_share_one_call() -> None:
    slow = Slow()
    shared = Shared("test", slow, keep=60)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(shared.result, 20) for _ in range(8)]
        eventually(lambda: slow.calls)
        slow.go_on.set()
        assert [one.result() for one in asked] == [1] * 8
    assert shared.result(0) == 1


def test_request_that_does_not_wait_gets_nothing_and_then_the_answer() -> None:
    slow = Slow()
    shared = Shared("test", slow, keep=60)
    assert shared.result(0) is None
    slow.go_on.set()
    assert eventually(lambda: shared.result(0)) == 1


def test_stale_answer_is_used_until_the_next_one_comes() -> None:
    slow = Slow()
    slow.go_on.set()
    shared = Shared("test", slow, keep=0, stale=60)
    assert shared.result(20) == 1
    slow.go_on.clear()
    assert shared.result(0) == 1
    assert shared.result(0) == 1
    slow.go_on.set()
    assert slow.calls == 2  # the one that these two requests started and did not wait for


def test_error_reaches_each_request_and_the_next_one_asks_again() -> None:
    calls = []

    def fail() -> int:
        calls.append(1)
        raise ValueError("boom")

    shared = Shared("test", fail, keep=60)
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            shared.result(20)
    assert len(calls) == 2


def test_forgotten_answer_is_asked_for_again() -> None:
    slow = Slow()
    slow.go_on.set()
    shared = Shared("test", slow, keep=60)
    assert [shared.result(20), shared.result(20)] == [1, 1]
    shared.forget()
    assert shared.result(20) == 2
