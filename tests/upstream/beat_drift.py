"""Celery: beat counts the next interval from the time of sending, not from the due time, so due times drift."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule


def fault() -> str:
    app = Celery("beat", set_as_current=False)
    first = datetime(2026, 1, 1, tzinfo=timezone.utc)
    sent = first + timedelta(seconds=64)  # due at 60, and beat was 4 s late
    every_minute = schedule(60, nowfun=lambda: sent, app=app)
    entry = ScheduleEntry(name="minutely", task="t", schedule=every_minute, last_run_at=first, app=app)
    _, seconds = entry.next().is_due()
    return f"the next due time is {seconds:g} s after a sending 4 s late, not 56 s" if seconds > 56 else ""
