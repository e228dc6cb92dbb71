"""What makes the main process doubt that the broker heard of a holder's acknowledgement."""

import time
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_dlock.deliveries import OVERDUE, Deliveries
from celery_dlock.runtime import Runtime


class EarlyAcknowledged:
    acknowledged = True

    def __init__(self, *, told: bool = False, failed: bool = False, closed: bool = False, ago: float = -60.0) -> None:
        self.message = SimpleNamespace(acknowledged=told, channel=SimpleNamespace(closed=closed))
        self.dlock_unheard = failed
        self.dlock_asked_at = time.monotonic() - ago


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"told": True, "ago": OVERDUE}, False),
        ({"told": True, "failed": True}, True),
        ({"closed": True}, True),
        ({}, False),
        ({"ago": OVERDUE}, True),
    ],
    ids=["heard", "failed", "its channel is gone", "on its way", "overdue"],
)
def test_an_early_acknowledgement_is_doubted_when_it_failed_or_is_overdue_and_not_while_it_is_on_its_way(
    state: dict[str, bool], expected: bool
) -> None:
    """Needless doubt costs a script; each look of the keeper may fall between the asking and the telling."""
    deliveries = Deliveries(Runtime(Celery("deliveries", set_as_current=False)))
    request = EarlyAcknowledged(**state)
    deliveries.by_owner["owner"] = request  # type: ignore[assignment]  # what is asked of it here
    assert deliveries.doubtful("owner.1") is expected
