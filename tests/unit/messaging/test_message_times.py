"""The times that a message names are read as Celery reads them, on every version of Python."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_dlock.messaging import publishing
from celery_dlock.messaging.message_times import seconds_until, start_delay

#: Celery reads them; ``datetime.fromisoformat`` refuses the first three everywhere, and the others on Python 3.10.
FORMS = [
    "2030",
    "2030-01",
    "2029-12-31T24:00",
    "2030-01-01T00:00:00.000000000Z",  # Go's RFC3339Nano
    "2030-01-01T00:00:00Z",
    "20300101T000000Z",
    "2030-01-01T05:30:00+0530",
    "2030-01-01 00:00:00",
    datetime(2030, 1, 1),  # noqa: DTZ001  # as kombu's JSON carries it
    datetime(2030, 1, 1, 5, 30, tzinfo=timezone(timedelta(hours=5, minutes=30))),
]


@pytest.mark.core
@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_time_in_every_form_of_celery_is_read(form: Any) -> None:
    expected = (datetime(2030, 1, 1, tzinfo=timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    assert seconds_until(form) == pytest.approx(expected, abs=5)


def test_time_that_is_absent_is_none() -> None:
    assert seconds_until(None) is None


def test_time_that_is_past_is_negative() -> None:
    assert seconds_until((datetime.now(timezone.utc) - timedelta(hours=1)).isoformat()) == pytest.approx(-3600, abs=5)


@pytest.mark.core
@pytest.mark.parametrize(
    "bad", ["", "soon", "2030-13", "2030-01-01T00:00+24:00", 0, 5, True, 1e999, {}, {"at": 1}, [1]]
)
def test_time_that_celery_cannot_read_is_a_value_error(bad: Any) -> None:
    with pytest.raises(ValueError, match="invalid time"):
        seconds_until(bad)


@pytest.mark.parametrize("edge", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_time_at_the_end_of_the_calendar_is_read_or_refused(edge: str) -> None:
    with contextlib.suppress(ValueError):
        assert abs(seconds_until(edge) or 0) > 10**10


# Where they are read


@pytest.mark.parametrize("form", ["2130", "2130-01-01T00:00:00.000000000Z"])
def test_start_delay_of_an_eta_in_any_form_is_its_time_left(form: str) -> None:
    expected = (datetime(2130, 1, 1, tzinfo=timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    assert start_delay({"eta": form, "countdown": None}) == pytest.approx(expected, abs=5)


def test_expiration_of_a_far_expiry_is_left_to_its_header() -> None:
    """RabbitMQ closes the channel over an expiration of more than 2**32 - 1 ms."""
    assert publishing._expiration("2130") is None
    assert publishing._expiration("2020") == 0.001
    soon = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    assert publishing._expiration(soon) == pytest.approx(3600, abs=5)
