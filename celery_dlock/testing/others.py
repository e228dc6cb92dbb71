"""The other workers that the kit plays, and the settings of an app during a test."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ..errors import DLockError
from ..keys.key_spec import shared_name
from ..keys.lock_name import LockName
from ..messaging.results import CallSkipped
from ..runtime import Runtime
from ..store.base import ReleaseRequest
from ..store.engine.store import EngineStore
from ..store.model import Acquired, AcquireRequest, Identity, Parked, QueueRequest, Replace, Requester

if TYPE_CHECKING:
    from celery import Celery

    from ..task.base import SingletonTask

__all__ = ["ELSEWHERE", "NotFreeError", "ask_to_stop", "name_of", "requester_of", "settings"]

#: The node name of the workers that the kit plays.
ELSEWHERE: Final = "another-worker@testing"


class NotFreeError(DLockError):
    """Another owner has the lock, or all its seats."""


@contextmanager
def settings(app: Celery, **values: Any) -> Iterator[None]:
    """Return a context in which an app has these settings."""
    conf: Any = app.conf
    conf.get("task_always_eager")  # loads the configuration
    own = conf.maps[0]
    before = {name: own[name] for name in values if name in own}
    conf.update(values)
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        conf.update(before)


def name_of(task: SingletonTask | str, args: Any, kwargs: Any) -> LockName:
    """Return the lock name of a call, or of the ``Lock`` of that text."""
    return shared_name(task) if isinstance(task, str) else task.lock_spec.name_of(args, kwargs)


def requester_of(task: SingletonTask | str) -> Requester:
    """Return a caller in another worker."""
    if isinstance(task, str):
        return Requester.of(None, None, ELSEWHERE, 1)
    return Requester.of(task.name, str(uuid.uuid4()), ELSEWHERE, 1)


def ask_to_stop(
    runtime: Runtime, store: EngineStore, name: LockName, task: SingletonTask, acquisition: str, ttl_ms: int
) -> str:
    """Let a newer call of another worker ask the holder to stop, and remove that call. Return its task id.

    Args:
        runtime: The runtime of the app.
        store: Its store.
        name: The lock name.
        task: The task, with ``on_conflict="replace"``.
        acquisition: The acquisition of the newer call.
        ttl_ms: Its ttl in milliseconds.
    """
    task_id = str(uuid.uuid4())
    identity, by = Identity(task_id), Requester.of(task.name, task_id, ELSEWHERE, 1)
    queue = QueueRequest(json.dumps([task.name, task_id]), replace=Replace())
    answer = store.acquire(name, acquisition, ttl_ms, AcquireRequest(by, identity, queue=queue))
    if isinstance(answer, Acquired):
        store.release(name, acquisition, ReleaseRequest(rolled_back=True, outcome_unknown=True))
    if not isinstance(answer, Parked):
        raise DLockError(f"cannot replace a call of {name}: none runs")
    publisher = runtime.grant_publisher
    if answer.evicted is not None:
        publisher.evict(name, answer.evicted, CallSkipped(f"{name}: replaced by {task_id}", name.text, task_id))
    removed = store.remove_waiter(name, identity.digest, acquisition, ended=True)
    publisher.publish_next(name, removed.granted)
    return task_id
