"""Open the store of five servers, and look at one server alone."""

import _thread
import itertools
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from celery_dlock.config.locations import locations_from_settings
from celery_dlock.errors import StoreUnavailable
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.factory import open_store
from celery_dlock.store.model import (
    Acquired,
    AcquireRequest,
)
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redlock.store import RedlockStore
from tests.contract.helpers import NAME, TTL, keys_of, request_of
from tests.support.proxy import Proxy
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server
from tests.support.stores import store_at

KEYS = keys_of()


#: Seconds: long for a server that is well on a busy machine, and short for one that hangs.
TIMEOUT = 2.0


def open_store_at(nodes: Sequence[Server | Proxy], **options: Any) -> RedlockStore:
    urls = [f"redis://{LOCK_USER}:{LOCK_PASSWORD}@127.0.0.1:{node.port}/0" for node in nodes]
    return open_store(locations_from_settings(urls, {}), **{"timeout": TIMEOUT, "prefix": "dlock", **options})  # type: ignore[return-value]


def refuse_threads(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """No thread for a call to a server can be started, after so many."""
    start, started = _thread.start_new_thread, itertools.count()

    def starts(*args: Any) -> Any:
        if next(started) >= most:
            raise RuntimeError("can't start new thread")
        return start(*args)

    monkeypatch.setattr(_thread, "start_new_thread", starts)


@contextmanager
def of_one(node: Server) -> Iterator[Any]:
    """The store of one server alone."""
    with closing(store_at(node.lock_url(), timeout=TIMEOUT)) as made:
        yield made


def acquired(store: RedlockStore, acquisition: str, request: AcquireRequest | None = None) -> Acquired:
    answer = store.acquire(NAME, acquisition, TTL, request or request_of())
    assert isinstance(answer, Acquired), answer
    return answer


def holders(nodes: Sequence[Server], keys: LockKeys = KEYS) -> list[str | None]:
    found = []
    for node in nodes:
        with node.client() as client:
            found.append(client.hget(keys.lock, "acq"))
    return found  # type: ignore[return-value]


def hold(node: Server, acquisition: str) -> None:
    with of_one(node) as alone:
        assert isinstance(alone.acquire(NAME, acquisition, TTL, request_of()), Acquired)


def try_release(store: RedlockStore, acquisition: str) -> bool:
    try:
        store.release(NAME, acquisition, ReleaseRequest())
    except StoreUnavailable:
        return False
    return True


def can_acquire(store: RedlockStore, owner: str) -> bool:
    acquisition = f"{owner}.{uuid.uuid4()}"
    try:
        return isinstance(store.acquire(NAME, acquisition, TTL, request_of()), Acquired)
    except StoreUnavailable:
        return False
    finally:
        try_release(store, acquisition)


def answer_or_none(store: RedlockStore, request: AcquireRequest) -> object:
    try:
        return store.acquire(NAME, f"q.{uuid.uuid4()}", TTL, request)
    except StoreUnavailable:
        return None
