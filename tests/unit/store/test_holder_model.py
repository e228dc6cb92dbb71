"""Records as text for people: task, worker and time, in UTC with the zone."""

import pytest

from celery_dlock.store.claim_model import ExistingCall
from celery_dlock.store.operator_model import RunView, Waiter

pytestmark = pytest.mark.core

SINCE, SHOWN = 1767323045.678, "2026-01-02T03:04:05.678+00:00"


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (
            ExistingCall("queued", "shop.bill", "id", "web1", SINCE),
            f"shop.bill[id] is queued (published by web1) since {SHOWN}",
        ),
        (ExistingCall("running", "shop.bill", "id", "", 0.0), "shop.bill[id] is running"),
        (Waiter("n", "digest", "shop.bill", "id", SINCE, "waiting", 1), f"shop.bill[id] waiting since {SHOWN}"),
        (
            RunView("n", "", "used", "shop.bill", "id", "w1", SINCE, 9.0, "key"),
            f"used by shop.bill[id] on w1 since {SHOWN}",
        ),
    ],
)
def test_record_as_text_names_its_time_in_utc(record: object, shown: str) -> None:
    assert str(record) == shown
