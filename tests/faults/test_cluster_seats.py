"""Seats (``limit``) in a Cluster that moves slots and promotes replicas while calls hold the seats and wait."""

import itertools
import json
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from redis.crc import key_slot

from celery_dlock.errors import StoreUnavailable
from celery_dlock.keys.key_spec import LockName, shared_name
from celery_dlock.locking.lease import Lease
from celery_dlock.store.base import LockStore
from celery_dlock.store.model import Acquired, AcquireRequest, Grant, Parked
from celery_dlock.store.redis.keys import LockKeys
from tests.contract import queue_helpers
from tests.contract.helpers import Party
from tests.support.polling import eventually
from tests.support.stores import store_at
from tests.support.topologies import ClusterSet

LIMIT = 3
NAME = shared_name("gpu")._replace(seats=LIMIT)
SLOT = key_slot(LockKeys.of("dlock", NAME).lock.encode())
CALLERS = 5
#: Longer than any failover of these tests, so that no lease ends because its watchdog could not renew it.
TTL = 30.0


class Bodies:
    """The bodies that run, by their seats."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._inside: set[int] = set()
        self.used: set[int] = set()
        self.most = self.clashes = self.ended = 0

    @contextmanager
    def running(self, seat: int) -> Iterator[None]:
        with self._guard:
            self.clashes += seat in self._inside
            self._inside.add(seat)
            self.used.add(seat)
            self.most = max(self.most, len(self._inside))
        yield
        with self._guard:
            self._inside.discard(seat)
            self.ended += 1

    def await_every_seat(self) -> None:
        """Wait until each seat has been used again."""
        self.used.clear()
        eventually(lambda: self.used >= set(range(LIMIT)), within=20, message="a seat is not used any more")

    def check(self) -> None:
        assert (self.clashes, self.most) == (0, LIMIT)


class Caller(Party):
    """One process whose calls wait for a seat, run, and end."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timeout=1)
        #: Calls that began, and calls that ran.
        self.began = self.ran = 0

    def lease(self, name: LockName = NAME) -> Lease:
        """Wait for a seat as a call under ``wait`` does, and again while the store does not answer."""
        for _ in range(100):
            context = self.new_context()
            try:
                found = self.lock_client.acquire_within(name, context, TTL, AcquireRequest(context.requester), 5.0)
            except StoreUnavailable:
                time.sleep(0.05)
                continue
            if isinstance(found, Lease):
                self.context = context
                return found
        raise AssertionError("a call never got a seat")

    def call(self, bodies: Bodies) -> None:
        self.began += 1
        lease = self.lease()
        with bodies.running(lease.seat):
            time.sleep(random.uniform(0.002, 0.01))
        self.lock_client.release(lease, self.context)
        self.ran += 1

    def run(self, bodies: Bodies, stop: threading.Event) -> None:
        while not stop.is_set():
            self.call(bodies)

    def close(self) -> None:
        eventually(lambda: not list(self.lease_table.records()), within=20, message="a release was not repeated")
        self.store.close()


@contextmanager
def calling(url: str, bodies: Bodies) -> Iterator[list[Caller]]:
    """Callers that call until the end. At the end, each call that began has run."""
    callers = [Caller(url) for _ in range(CALLERS)]
    stop = threading.Event()
    with ThreadPoolExecutor(CALLERS) as pool:
        running: list[Future[None]] = [pool.submit(caller.run, bodies, stop) for caller in callers]
        try:
            bodies.await_every_seat()
            yield callers
            bodies.await_every_seat()
        finally:
            stop.set()
        for each in running:
            each.result(30)
    for caller in callers:
        assert (caller.ran, caller.lost) == (caller.began, [])
        caller.close()


class QueuedCalls:
    """Calls under ``queue``, a broker in memory, and workers that take its messages."""

    def __init__(self, url: str, bodies: Bodies) -> None:
        self._url, self._bodies = url, bodies
        self._broker: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self.sent: list[str] = []
        self.ran: list[str] = []

    def send(self, number: int) -> None:
        for _ in range(number):
            self.sent.append(f"t{len(self.sent)}")
            self._broker.put((self.sent[-1], ""))

    @contextmanager
    def workers(self) -> Iterator[None]:
        with ThreadPoolExecutor(CALLERS + 1) as pool:
            running = [pool.submit(self._work) for _ in range(CALLERS)]
            running.append(pool.submit(self._sweep))
            try:
                yield
                eventually(lambda: len(self.ran) >= len(self.sent), within=30, message="a waiting call was lost")
            finally:
                self._stop.set()
            for each in running:
                each.result(30)

    def _work(self) -> None:
        store = store_at(self._url, timeout=5)
        for number in itertools.count():
            if self._stop.is_set():
                break
            try:
                task_id, grant_id = self._broker.get(timeout=0.05)
            except queue.Empty:
                continue
            acquisition = f"{task_id}.{threading.get_ident()}{number}"
            answer = queue_helpers.ask(store, acquisition, task_id, NAME, parks=True, grant_id=grant_id)  # type: ignore[arg-type]  # a store of Redis
            if isinstance(answer, Acquired):
                with self._bodies.running(answer.seat):
                    time.sleep(random.uniform(0.002, 0.01))
                self._publish(store, store.release(NAME, acquisition, queue_helpers.ending(task_id)).granted)
                self.ran.append(task_id)
            else:
                assert isinstance(answer, Parked), answer
                self._publish(store, answer.granted)
        store.close()

    def _sweep(self) -> None:
        store = store_at(self._url, timeout=5)
        for number in itertools.count():
            if self._stop.wait(0.05):
                break
            swept = store.sweep(NAME._replace(seats=0), f"sweeper.{number}", queue_helpers.TURN, queue_helpers.TRIES)
            self._publish(store, swept.granted)
        store.close()

    def _publish(self, store: LockStore, granted: Grant | None) -> None:
        if granted is not None:
            self._broker.put((json.loads(granted.entry.partition("\n")[0])[1], granted.grant_id))
            store.confirm_publish(NAME, granted.identity, queue_helpers.TURN)


def move(cluster: ClusterSet) -> None:
    """Move the slot to another node, with rests half-way."""
    source = cluster.node_of(SLOT)
    cluster.begin_move(SLOT, random.choice([node for node in cluster.primaries() if node is not source]))
    time.sleep(0.05)
    cluster.move_keys(SLOT, 2)  # of about six: from here on some keys are there and some are here
    time.sleep(0.1)
    cluster.move_keys(SLOT)
    cluster.end_move(SLOT)


@pytest.mark.invariant("resharding-loses-no-lease", "seats-are-locks")
@pytest.mark.parametrize("moves", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_moving_slot_leaves_one_body_in_each_seat_and_loses_no_call(
    own_cluster: Callable[..., ClusterSet], moves: int
) -> None:
    cluster, bodies = own_cluster(replicas=0), Bodies()
    with calling(cluster.lock_url(), bodies):
        for _ in range(moves):
            move(cluster)
            bodies.await_every_seat()
    bodies.check()


@pytest.mark.invariant("resharding-loses-no-lease", "seats-share-a-queue")
@pytest.mark.parametrize("moves", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_moving_slot_loses_no_queued_call_and_leaves_one_body_in_each_seat(
    own_cluster: Callable[..., ClusterSet], moves: int
) -> None:
    cluster, bodies = own_cluster(replicas=0), Bodies()
    calls = QueuedCalls(cluster.lock_url(), bodies)
    with calls.workers():
        for _ in range(moves):
            calls.send(30)
            move(cluster)
            calls.send(30)
            bodies.await_every_seat()
    bodies.check()
    assert sorted(calls.ran) == sorted(calls.sent)


@pytest.mark.invariant("resharding-loses-no-lease", "seats-are-locks")
def test_move_that_stops_half_way_for_longer_than_the_ttl_loses_no_seat(
    own_cluster: Callable[..., ClusterSet],
) -> None:
    cluster, ttl = own_cluster(replicas=0), 1.2
    party = Caller(cluster.lock_url())
    leases = [party.acquire(NAME, context=party.new_context(), ttl=ttl) for _ in range(LIMIT)]
    source = cluster.node_of(SLOT)
    cluster.begin_move(SLOT, next(node for node in cluster.primaries() if node is not source))
    for _ in range(3):
        cluster.move_keys(SLOT, 1)
        time.sleep(ttl / 2)
    cluster.move_keys(SLOT)
    time.sleep(ttl)
    assert party.lost == []
    assert all(lease.held for lease in leases)
    cluster.end_move(SLOT)
    for record in list(party.lease_table.records()):
        record.clear()
    party.store.close()


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.parametrize("failovers", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_promoted_replica_leaves_one_body_in_each_seat_and_loses_no_call(
    own_cluster: Callable[..., ClusterSet], failovers: int
) -> None:
    """The operator promotes the replica (``CLUSTER FAILOVER``), which by then has all that the primary had."""
    cluster, bodies = own_cluster(replicas=3), Bodies()
    with calling(cluster.lock_url(), bodies):
        for _ in range(failovers):
            cluster.fail_over(SLOT, "manual")
            cluster.wait_until_whole()
            bodies.await_every_seat()
    bodies.check()


@pytest.mark.slow
@pytest.mark.invariant("promoted-replica-keeps-leases", "seats-are-locks")
def test_seats_held_before_their_primary_dies_stay_held_at_the_promoted_replica(
    own_cluster: Callable[..., ClusterSet],
) -> None:
    """Calls wait meanwhile. They get the seats one by one as these are released."""
    cluster, bodies = own_cluster(replicas=3, node_timeout_ms=1000), Bodies()
    holder = Caller(cluster.lock_url())
    held = [(holder.lease(), holder.context) for _ in range(LIMIT)]
    assert sorted(lease.seat for lease, _ in held) == list(range(LIMIT))
    callers = [Caller(cluster.lock_url()) for _ in range(CALLERS)]
    with cluster.node_of(SLOT).client() as client:
        client.set(f"{{{NAME.bucket:03x}}}", "1")
        assert client.wait(1, 5000) == 1
    with ThreadPoolExecutor(CALLERS) as pool:
        waiting = [pool.submit(caller.call, bodies) for caller in callers]
        eventually(lambda: all(caller.began for caller in callers), within=20)
        cluster.fail_over(SLOT, "kill")
        time.sleep(1)  # the waiting calls ask the new primary
        assert bodies.ended == 0
        assert holder.lost == []
        for number, (lease, context) in zip(itertools.count(1), held, strict=False):
            assert holder.lock_client.renew(lease, TTL)
            assert holder.lock_client.release(lease, context)
            eventually(lambda number=number: bodies.ended >= number, within=20)  # type: ignore[misc]  # mypy infers no default's type
        for each in waiting:
            each.result(30)
    assert (bodies.ended, bodies.clashes) == (CALLERS, 0)
    assert [caller.lost for caller in callers] == [[]] * CALLERS
    for caller in (*callers, holder):
        caller.close()
