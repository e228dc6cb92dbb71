"""Common parts of the contract tests: names of locks, acquires of owners, and a lock client with its watchdog."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from celery_dlock.config.locations import locations_from_settings
from celery_dlock.keys.key_spec import LockName, shared_name
from celery_dlock.locking.client import LockClient
from celery_dlock.locking.events import Event, Listeners, Loss
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.lease_source import LocalLeaseSource
from celery_dlock.locking.lease_table import LeaseRecord, LocalLeaseTable
from celery_dlock.locking.owner import OwnerContext
from celery_dlock.locking.watchdog import Watchdog, WatchdogHooks
from celery_dlock.options.durability import PRIMARY, Durability
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.factory import open_store
from celery_dlock.store.model import Acquired, AcquireRequest, Identity, Requester
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import SCRIPTS, Script
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.utils.clock import SystemClock
from tests.support.proxy import Proxy
from tests.support.scripts import all_variants, shas

TTL = 30_000


#: The lock of most tests.
NAME = shared_name("x")


def keys_of(text: str = "x", prefix: str = "dlock") -> LockKeys:
    return LockKeys.of(prefix, shared_name(text))


def load_scripts(client: redis.Redis) -> None:
    """Load every variant of every script, so that the store sends none by its text."""
    for script in SCRIPTS.values():
        for variant in all_variants(script):
            client.script_load(variant.source.decode())


def cut_reply(proxy: Proxy, script: Script, times: int | None = 1) -> None:
    """Lose the next replies of this script. The server has run it."""
    proxy.set_mode("cut_reply", times=times, containing=shas(script))


def request_of(task_id: str | None = None, **facts: Any) -> AcquireRequest:
    identity = Identity(task_id) if task_id else None
    return AcquireRequest(Requester.of("app.post" if task_id else None, task_id, "node1", 77), identity, **facts)


def ending_of(task_id: str, **facts: Any) -> ReleaseRequest:
    by = Requester.of("app.post", task_id, "node1", 77)
    return ReleaseRequest(identity=Identity(task_id).digest, requester=by.text, **{"final": True, **facts})


def take(
    store: RedisStore, acquisition: str, request: AcquireRequest | None = None, *, name: LockName = NAME
) -> Acquired:
    answer = store.acquire(name, acquisition, TTL, request or request_of())
    assert isinstance(answer, Acquired), answer
    return answer


def of_one_acquisition(first: Acquired, again: Acquired, topology: str) -> bool:
    """Have both answers one token? Of several servers one may have come late to the first, with a higher one."""
    return again.token == first.token or (topology.startswith("redlock") and again.token > first.token)


@contextmanager
def commands_seen(client: redis.Redis) -> Iterator[list[tuple[str, list[str]]]]:
    """Fills, at its end, the list with what the server carried out: ("tcp" or "lua", words)."""
    seen: list[tuple[str, list[str]]] = []
    start, end = uuid.uuid4().hex, uuid.uuid4().hex
    with client.monitor() as monitor:  # type: ignore[no-untyped-call]
        client.echo(start)  # from here on the client has its second connection
        yield seen
        client.echo(end)
        for line in monitor.listen():
            if start in line["command"]:
                seen.clear()
            elif end in line["command"]:
                return
            else:
                seen.append((line["client_type"], line["command"].split(" ")))


class _Losses(WatchdogHooks):
    def __init__(self, lost: list[str]) -> None:
        self._lost = lost

    def lost(self, record: LeaseRecord, reason: Loss) -> None:
        self._lost.append(reason.text)


class Party:
    """One process's lock client and watchdog, with short timeouts, and all that listeners received.

    The watchdog's thread runs only where the lock client wakes it: after an acquire, or a release that failed. It
    reports to `hooks`; without them, the texts of the losses are in `lost`.
    """

    def __init__(
        self,
        url: str | list[str],
        *,
        timeout: float = 0.5,
        durability: Durability = PRIMARY,
        hooks: WatchdogHooks | None = None,
    ) -> None:
        self.told: list[Event] = []
        places = locations_from_settings(url, {})
        self.store = open_store(places, timeout=timeout, prefix="dlock", durability=durability)
        self.lease_table = LocalLeaseTable()
        listeners = Listeners()
        listeners.add(self.told.append)
        self.lost: list[str] = []
        kept = open_store(places, timeout=timeout, prefix="dlock", durability=durability)
        self.watchdog = Watchdog({timeout: kept}, SystemClock(), hooks or _Losses(self.lost))
        source = LocalLeaseSource(self.lease_table, lambda record, released: None)
        self.lease_table.wake = lambda: self.watchdog.watch(source)
        self.lock_client = LockClient(self.store, self.lease_table, SystemClock(), listeners)
        self.context = self.new_context()

    def new_context(self) -> OwnerContext:
        return OwnerContext(uuid.uuid4().hex, Requester.of(None, None, "node1", 77))

    def acquire(self, name: LockName, *, context: OwnerContext | None = None, ttl: float = 30.0) -> Lease:
        context = context or self.context
        lease = self.lock_client.acquire(name, context, ttl, AcquireRequest(context.requester))
        assert isinstance(lease, Lease), lease
        return lease

    def release(self, lease: Lease, ending: ReleaseRequest | None = None) -> bool:
        return self.lock_client.release(lease, self.context, ending or ReleaseRequest())

    def kinds_told(self) -> list[str]:
        return [event.kind for event in self.told]
