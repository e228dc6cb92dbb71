"""Holders that write to a resource on command, each with its own token or all with the same one."""

from celery_dlock import LockLost, singleton_task
from tests.support.apps.base import make_app
from tests.support.apps.fencing_resources import SAME, WRITES
from tests.support.apps.marks import mark, marks_client

app = make_app(
    "fencing",
)


@singleton_task(app=app, bind=True, key=["name"], ttl=2, wait=60, on_conflict="raise")
def writes(self, name, row, kind, place, values, fenced):
    """Is sure of its lease, waits until the test lets it go, and writes without asking again."""
    token = self.lease.token if fenced else SAME
    self.lease.ensure()
    mark(row, "sure")
    with marks_client() as client:
        client.blpop(f"go:{row}", timeout=60)
    try:
        for value in values:
            WRITES[kind](place, name, value, token)
            mark(row, f"wrote {value}")
    except LockLost:
        mark(row, "refused")
    return token
