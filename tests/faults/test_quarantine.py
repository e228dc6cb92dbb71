"""Failovers that forget leases, again and again: who is granted what another still believes to hold."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from celery_dlock.config.locations import locations_from_settings
from celery_dlock.errors import StoreUnavailable
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking.lease import drift_margin
from celery_dlock.store.factory import open_store
from celery_dlock.store.model import Acquired, AcquireRequest, Requester
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.server_model import Quarantine
from tests.support.polling import eventually
from tests.support.replicas import ReplicaSet
from tests.support.servers import Server
from tests.support.stores import name_in

#: Seconds without a renewal: a holder that was cut off believes in its lease for as long as this ...
TTL = 1.0
#: ... and where the test does not wait for its end, for longer than a failover takes on a busy machine.
LONG = 30.0
_numbers = itertools.count()


class Contender:
    """Asks for locks at one server, and notes from when until when it believes to hold them."""

    def __init__(self, server: Server, ttl: float, probation: Quarantine | None) -> None:
        self._ttl = ttl
        self._store = open_store(
            locations_from_settings(server.url(), {}), timeout=5, prefix="dlock", quarantine=probation
        )
        self.believed: dict[LockKeys, tuple[float, float]] = {}

    def ask(self, keys: LockKeys) -> bool:
        sent = time.monotonic()
        request = AcquireRequest(Requester.of(None, None, "node1", 1))
        try:
            answer = self._store.acquire(name_in(keys), f"c.{next(_numbers)}", round(self._ttl * 1000), request)
        except StoreUnavailable:
            return False
        if isinstance(answer, Acquired):
            self.believed[keys] = sent, sent + self._ttl - drift_margin(self._ttl)
        return isinstance(answer, Acquired)

    def contend(self, names: list[LockKeys], granted: threading.Event) -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end and not granted.is_set():
            for keys in names:
                if self.ask(keys):
                    granted.set()
            time.sleep(0.01)


def a_failover(servers: ReplicaSet, ttl: float, probation: Quarantine | None = None) -> int:
    """Locks that two believed to hold: the primary is killed, and its replica knows nothing of them."""
    (replica,) = servers.replicas
    # Of one bucket. A caller that waits until its quarantine is over waits for that of all of them.
    names = [LockKeys.of("dlock", shared_name(f"name{next(_numbers)}")._replace(bucket=7)) for _ in range(4)]
    holder = Contender(servers.primary, ttl, probation)
    eventually(lambda: holder.ask(names[0]), within=20)  # after the very first start
    servers.cut_off(replica)
    for keys in names[1:]:
        assert holder.ask(keys)
    old = servers.promote(replica)
    others = [Contender(replica, ttl, probation) for _ in range(3)]
    granted = threading.Event()
    threads = [threading.Thread(target=other.contend, args=(names[1:], granted)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    old.start()
    servers.follow(old)
    servers.wait_until_in_step()
    taken = {keys: since for other in others for keys, (since, _) in other.believed.items()}
    assert taken, "nobody was granted anything afterwards"
    return sum(since < holder.believed[keys][1] for keys, since in taken.items())


def test_failover_without_a_quarantine_grants_lost_locks_twice(tmp_path: Path) -> None:
    with ReplicaSet(tmp_path) as servers:
        assert a_failover(servers, LONG) > 0


@pytest.mark.invariant("quarantine-grants-nothing-new", "quarantine-delays-grants")
def test_quarantine_grants_no_lock_twice_in_ten_failovers(tmp_path: Path) -> None:
    def five(which: int) -> list[int]:
        with ReplicaSet(tmp_path / f"{which}") as servers:
            return [a_failover(servers, TTL, Quarantine(TTL)) for _ in range(5)]

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(five, range(2))] == [[0] * 5] * 2
