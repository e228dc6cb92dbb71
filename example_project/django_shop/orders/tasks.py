"""The tasks. Each decorator declares what must not happen twice, or not at the same time."""

import os
import time
from datetime import timedelta

from django.utils import timezone

from celery_dlock import singleton_task
from orders.models import Order

#: Seconds that a task takes, long enough to look at its lock in the admin.
WORK = float(os.environ.get("WORK_SECONDS", "20"))


# An order has one invoice: a second call within a day is skipped. If the process dies, an operator decides whether the
# invoice went out, in the admin under "Unknown outcomes".
@singleton_task(key=["order_id"], once_per=timedelta(days=1), after_crash="hold")
def send_invoice(order_id: int) -> None:
    order = Order.objects.get(pk=order_id)
    time.sleep(WORK)  # writes a PDF file and sends it
    order.invoice_sent_at = timezone.now()
    order.save(update_fields=["invoice_sent_at"])


# The entries of one customer are booked one at a time, in their order. Those that wait are under "Waiting calls".
@singleton_task(key=["customer"], on_conflict="queue", acks_late=True)
def book(customer: str, amount: int) -> str:
    time.sleep(WORK)
    return f"{customer}: {amount}"
