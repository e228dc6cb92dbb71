"""Tasks that hold their locks until the test opens a gate, for what an operator sees of them."""

from __future__ import annotations

from celery_dlock import singleton_task
from tests.support.apps.base import History, make_app

app = make_app("operating", configurable=True, worker_log_color=False)
history = History.of_environ()


@singleton_task(app=app, name="shop.sync", key="{customer}", ttl=10)
def sync(customer: str, secret: str = "") -> None:  # noqa: ARG001  # an argument that nothing may show
    """Hold the lock until the gate of the customer opens."""
    history.note("in", customer=customer)
    history.pass_gate(customer)


@singleton_task(app=app, name="shop.import", key="{customer}", ttl=10, on_conflict="queue")
def import_(customer: str, gate: str = "") -> None:
    """Wait behind the calls of the same customer."""
    history.note("in", customer=customer)
    history.pass_gate(gate)


@singleton_task(app=app, name="shop.send_sms", key="{order}", ttl=10, once_per=3600, after_crash="hold")
def send_sms(order: str, gate: str = "") -> None:
    """Send an SMS, of which only one may arrive."""
    history.note("in", customer=order)
    history.pass_gate(gate)


@singleton_task(app=app, name="shop.rebuild", key="{page}", ttl=10, unique="queued")
def rebuild(page: str) -> None:
    """Run only once for all calls that were published before it starts."""
    history.note("in", customer=page)
