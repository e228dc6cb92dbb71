"""The header with the time of publication: which calls carry it, and which time."""

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish

from celery_dlock import singleton_task
from celery_dlock.messaging.message import sent_us
from celery_dlock.messaging.message_times import SENT_HEADER

app = Celery("sent_time", broker="memory://", set_as_current=False)


@singleton_task(app=app, bind=True, name="sent_time.queued", on_conflict="queue", max_retries=3, shared=False)
def queued(self: Any, _n: int = 0, countdown: float = 0.0) -> None:
    raise self.retry(countdown=countdown)


@singleton_task(app=app, name="sent_time.skips", shared=False)
def skips() -> None: ...


@singleton_task(app=app, name="sent_time.debounced", on_conflict="queue", debounce=5, shared=False)
def debounced() -> None: ...


@pytest.fixture
def headers() -> Iterator[list[dict[str, Any]]]:
    """The headers of each message that is published, in order."""
    found: list[dict[str, Any]] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        found.append(headers)

    before_task_publish.connect(note)
    yield found
    before_task_publish.disconnect(note)


def now_us() -> int:
    return round(time.time() * 1e6)


def test_calls_of_one_publisher_under_queue_carry_rising_times(headers: list[dict[str, Any]]) -> None:
    before = now_us()
    for n in range(3):
        queued.apply_async((n,), headers={"mine": n})
    times = [header[SENT_HEADER] for header in headers]
    assert before <= times[0] < times[1] < times[2] <= now_us()
    assert [header["mine"] for header in headers] == [0, 1, 2]


def test_calls_under_other_policies_carry_no_time(headers: list[dict[str, Any]]) -> None:
    skips.delay()
    debounced.delay()
    queued.apply_async(dlock={"enabled": False})
    skips.apply_async(dlock={"on_conflict": "queue"})
    assert [SENT_HEADER in header for header in headers] == [False, False, False, True]


def test_call_with_an_eta_carries_its_eta(headers: list[dict[str, Any]]) -> None:
    before = now_us()
    queued.apply_async(countdown=60)
    queued.apply_async(eta=datetime.now(timezone.utc) + timedelta(seconds=60))
    assert all(0 <= header[SENT_HEADER] - before - 60_000_000 < 5_000_000 for header in headers)


def test_retry_carries_its_own_time(headers: list[dict[str, Any]]) -> None:
    """Celery copies the headers of a message into its retry, which goes behind the calls that wait."""
    queued.push_request(id="a", headers={SENT_HEADER: 5}, called_directly=False, args=(), kwargs={}, delivery_info={})
    before = now_us()
    with pytest.raises(Exception, match="Retry in 30"):
        queued.run(0, 30)
    queued.pop_request()
    assert headers[0][SENT_HEADER] - before >= 30_000_000


@pytest.mark.parametrize("sent", [None, "1", 1.5, True, -1, 2**53 + 1, [], {}])
def test_invalid_time_is_no_time(sent: object) -> None:
    assert sent_us({SENT_HEADER: sent}) == 0
    assert sent_us({}) == 0
    assert sent_us({SENT_HEADER: 7}) == 7
