"""The earlier run of a name whose lock its owner enters again (``once_per``)."""

from __future__ import annotations

import json

from ..keys.lock_name import LockName
from ..store.base import LockStore
from ..store.holder_model import Holder
from ..store.model import AcquireRequest, Requester, Used
from ..utils.clock import Clock
from .lease import Lease

__all__ = ["used_before"]


def used_before(store: LockStore, clock: Clock, name: LockName, held: Lease, request: AcquireRequest) -> Used | None:
    """Return the earlier successful run of the name, nested or not; None if there is none."""
    if held.inner_use is not None and held.inner_use.tick == request.tick:
        by = Requester(*json.loads(held.inner_use.requester))
        return Used(Holder(by.task, by.task_id, by.node, int(by.pid), clock.wall()), same_message=False)
    use = store.last_run(name, request.tick)
    if use is None or use.state != "used":
        return None
    return Used(Holder(use.task or None, use.task_id or None, use.worker, None, use.since), same_message=False)
