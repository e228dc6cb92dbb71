"""A Cluster that loses nodes and moves slots while locks are held, taken and waited for."""

import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import pytest
from celery import Celery
from redis.crc import key_slot

from celery_dlock import runtime
from celery_dlock.errors import ReplyTimeout, StoreUnavailable
from celery_dlock.keys.key_spec import LockName, shared_name
from celery_dlock.locking.client import LockClient
from celery_dlock.locking.events import Loss
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.lease_table import LeaseRecord
from celery_dlock.locking.owner import OwnerContext
from celery_dlock.locking.watchdog import WatchdogHooks
from celery_dlock.runtime import Runtime
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, AcquireRequest, Grant, Held, Identity, Requester
from celery_dlock.store.redis.cluster import members as cluster_members
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract import queue_helpers
from tests.contract.helpers import Party, request_of, take
from tests.support.cluster_nodes import ask, myself, slots_of
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.stores import name_in, store_at
from tests.support.topologies import ClusterSet


class _TimedLosses(WatchdogHooks):
    def __init__(self) -> None:
        self.losses: dict[LockName, tuple[str, float]] = {}

    def lost(self, record: LeaseRecord, reason: Loss) -> None:
        self.losses[record.name] = reason.text, time.monotonic()


class Keeping(Party):
    """Holds leases, and notes which were called lost, why, and when."""

    def __init__(self, url: str) -> None:
        hooks = _TimedLosses()
        super().__init__(url, timeout=0.4, hooks=hooks)
        self.losses = hooks.losses

    def hold(self, names: list[LockName], ttl: float) -> dict[LockName, Lease]:
        return {name: self.acquire(name, context=self.new_context(), ttl=ttl) for name in names}

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def keeping() -> Iterator[Callable[[ClusterSet], Keeping]]:
    made: list[Keeping] = []

    def make(cluster: ClusterSet) -> Keeping:
        made.append(Keeping(cluster.lock_url()))
        return made[-1]

    yield make
    for one in made:
        for slot in one.lease_table.records():
            slot.clear()  # its watchdog ends, and with it its connections
        one.close()


def slot_of(name: LockName) -> int:
    return key_slot(LockKeys.of("dlock", name).lock.encode())


NAMES = [shared_name(f"lock {n}") for n in range(24)]


def on(cluster: ClusterSet, node: Server) -> set[LockName]:
    return {name for name in NAMES if cluster.node_of(slot_of(name)) is node}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSet]:
    """Without replicas, and those that are left go on."""
    options = ("--cluster-require-full-coverage", "no")
    with ClusterSet(tmp_path_factory.mktemp("away"), replicas=0, options=options) as made:
        yield made


class TestOneNodeIsAway:
    @pytest.fixture(autouse=True)
    def empty(self, cluster: ClusterSet) -> None:
        cluster.flush()

    @pytest.mark.invariant("absent-node-costs-only-its-locks", "absent-node-is-reported")
    @pytest.mark.parametrize("how", ["stop", "kill"])
    def test_leases_on_other_nodes_are_renewed_and_own_losses_reported_in_time(
        self, cluster: ClusterSet, keeping: Callable[[ClusterSet], Keeping], how: str
    ) -> None:
        """Also such short ones: one that is away takes a part of one timeout from each round, and no more."""
        party = keeping(cluster)
        ttl = 1.2
        node = cluster.node_of(slot_of(NAMES[0]))
        theirs = on(cluster, node)
        assert 4 <= len(theirs) <= 16
        leases = party.hold(NAMES, ttl)
        began = time.monotonic()
        node.pause() if how == "stop" else node.kill()
        try:
            eventually(lambda: theirs <= party.losses.keys(), within=10)
            for name in theirs:
                # Of its last renewal, which was before the node went away, no later than its end.
                assert party.losses[name][1] - began < ttl
            time.sleep(max(0.0, began + 3 * ttl - time.monotonic()))  # long enough to lose any that is not renewed
            assert {name: why for name, why in party.losses.items() if name not in theirs} == {}
            assert all(leases[name].remaining() > 0 for name in NAMES if name not in theirs)
        finally:
            node.resume() if how == "stop" else node.start()
            cluster.wait_until_whole()

    @pytest.mark.invariant("absent-node-is-reported")
    def test_locks_on_the_other_nodes_are_taken_and_released_without_delay(
        self, cluster: ClusterSet, keeping: Callable[[ClusterSet], Keeping]
    ) -> None:
        party = keeping(cluster)
        node = cluster.node_of(slot_of(NAMES[0]))
        theirs = on(cluster, node)
        party.hold([NAMES[0]], 30)  # a connection to it is there
        node.pause()
        try:
            with pytest.raises(StoreUnavailable):
                party.acquire(next(name for name in theirs if name is not NAMES[0]))
            began = time.monotonic()
            for name in set(NAMES) - theirs:
                lease = party.acquire(name)
                assert party.release(lease)
            assert time.monotonic() - began < 1
        finally:
            node.resume()
            cluster.wait_until_whole()

    def test_messages_of_the_absent_nodes_locks_are_republished_and_others_run(
        self, cluster: ClusterSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = Celery("away", broker="memory://", set_as_current=False)
        app.conf.update(dlock_url=cluster.lock_url(), dlock_timeout=0.4)
        monkeypatch.setattr(runtime, "BREAKER_RESET", 30)
        lock_client = Runtime.of(app).lock_client

        def run(name: LockName) -> None:
            task_id = uuid.uuid4().hex
            context = OwnerContext(task_id, Requester("app.post", task_id, "node1", "77"), delivered=True)
            lease = lock_client.acquire(name, context, 30, AcquireRequest(context.requester, Identity(task_id)))
            assert isinstance(lease, Lease), lease
            assert lock_client.release(lease, context)

        for name in NAMES:
            run(name)
        node = cluster.node_of(slot_of(NAMES[0]))
        first, *rest = on(cluster, node)
        node.pause()
        try:
            with pytest.raises(ReplyTimeout):
                run(first)
            for name in rest:
                with pytest.raises(StoreUnavailable, match="was not asked: it did not answer"):
                    run(name)
            for name in set(NAMES) - {first, *rest}:
                run(name)
        finally:
            node.resume()
            cluster.wait_until_whole()


class TestFailover:
    @pytest.mark.invariant("promoted-replica-keeps-leases")
    def test_lease_survives_with_its_data_and_its_loss_is_reported_otherwise(
        self, own_cluster: Callable[..., ClusterSet], keeping: Callable[[ClusterSet], Keeping]
    ) -> None:
        cluster = own_cluster(node_timeout_ms=1000)
        party = keeping(cluster)
        ttl = 6.0
        node = cluster.node_of(slot_of(NAMES[0]))
        (replica,) = cluster.replicas_of(node)
        unlucky = NAMES[0]
        leases = party.hold(NAMES[1:], ttl)
        with node.client() as client:
            client.set(f"{{{unlucky.bucket:03x}}}", "1")
            assert client.wait(1, 5000) == 1
        # What is taken from here on never reaches the replica: it cannot take up the link that was cut.
        replica.pause()
        ask(node, "CLIENT KILL TYPE replica")
        leases |= party.hold([unlucky], ttl)
        began = time.monotonic()
        with _load(cluster.lock_url()) as taken:
            node.kill()
            replica.resume()
            assert cluster.wait_for_promotion(slot_of(unlucky), node) is replica
            eventually(lambda: unlucky in party.losses, within=10)
            time.sleep(max(0.0, began + ttl + 1 - time.monotonic()))
        assert taken() > 10
        reason, told = party.losses[unlucky]
        assert (reason, told - began < ttl) == ("the store no longer knows it", True)
        assert party.losses.keys() == {unlucky}
        onlooker = store_at(cluster.lock_url(), timeout=5)
        for name in NAMES[1:]:
            holder = onlooker.inspect(name)
            assert (holder and holder.owner, leases[name].remaining() > 0) == (leases[name].owner, True)
        onlooker.close()

    @pytest.mark.invariant("waiters-wake-across-slots")
    def test_waiting_call_is_woken_by_a_release_at_the_new_primary(
        self, own_cluster: Callable[..., ClusterSet]
    ) -> None:
        """Also where the old one is silent, and so does not say that the subscription is over."""
        cluster = own_cluster(primaries=3, replicas=3, node_timeout_ms=500)
        keys = LockKeys.of("dlock", NAMES[0])
        here, there = (cast("RedisStore", store_at(cluster.lock_url(), timeout=1)) for _ in range(2))
        take(here, "o.1", name=name_in(keys))
        listener = there.release_listener(name_in(keys))
        assert isinstance(there.acquire(name_in(keys), "p.1", 30_000, request_of(notify=True)), Held)
        cluster.fail_over(slot_of(NAMES[0]), "stop")
        listener.wait(0.01)  # at the old primary, which does not answer

        def found(store: RedisStore) -> bool:
            try:
                return isinstance(store.acquire(name_in(keys), "p.2", 30_000, request_of(notify=True)), Held)
            except StoreUnavailable:
                return False

        for store in (here, there):
            eventually(lambda store=store: found(store), within=10)  # type: ignore[misc]
        released = threading.Timer(0.2, here.release, (name_in(keys), "o.1", ReleaseRequest()))
        released.start()
        began = time.monotonic()
        assert listener.wait(5)
        assert time.monotonic() - began < 2
        released.join()
        here.close()
        there.close()


@contextmanager
def _load(url: str) -> Iterator[Callable[[], int]]:
    """Another worker; gives how often it had a lock. What fails meanwhile it tries again."""
    stop = threading.Event()

    def run() -> int:
        party = Party(url, timeout=0.5)
        count = 0
        while not stop.is_set():
            context = party.new_context()
            try:
                lease = party.acquire(shared_name(f"load {random.randrange(10_000)}"), context=context)
                party.lock_client.release(lease, context)
                count += 1
            except StoreUnavailable:
                time.sleep(0.05)
            time.sleep(0.002)
        party.store.close()
        return count

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield running.result
        finally:
            stop.set()


class TestResharding:
    """Two slots go from node to node and back, with rests half-way, while what is in them is used."""

    ROUNDS = 3

    @pytest.mark.invariant("resharding-loses-no-lease")
    def test_resharding_overlaps_no_bodies_and_loses_no_lease(
        self, own_cluster: Callable[..., ClusterSet], keeping: Callable[[ClusterSet], Keeping]
    ) -> None:
        cluster = own_cluster(replicas=0)
        held, contended, queued = (shared_name(text) for text in ("held", "contended", "queued"))
        slots = {slot_of(name) for name in (held, contended, queued)}
        party = keeping(cluster)
        leases = party.hold([held], 4.0)
        stop = threading.Event()
        guard = _Guard()
        with ThreadPoolExecutor(4) as pool:
            work = [
                *(pool.submit(_contend, cluster.lock_url(), contended, guard, stop) for _ in range(3)),
                pool.submit(_queue, cluster.lock_url(), LockKeys.of("dlock", queued), stop),
            ]
            try:
                for _, slot in itertools.product(range(self.ROUNDS), slots):
                    self.move(cluster, slot)
            finally:
                stop.set()
            done = [each.result(10) for each in work]
        assert min(done) >= self.ROUNDS
        assert guard.overlaps == 0
        assert party.losses == {}
        assert leases[held].remaining() > 0
        assert {f"errorstat_{kind}" for kind in ("MOVED", "ASK", "TRYAGAIN")} <= set().union(
            *map(_errors, cluster.nodes)
        )

    def move(self, cluster: ClusterSet, slot: int) -> None:
        source = cluster.node_of(slot)
        to = random.choice([node for node in cluster.primaries() if node is not source])
        cluster.begin_move(slot, to)
        time.sleep(0.05)
        cluster.move_keys(slot, 1)
        time.sleep(0.05)
        cluster.move_keys(slot)
        time.sleep(0.05)
        cluster.end_move(slot)
        time.sleep(0.1)


def _errors(node: Server) -> set[str]:
    with node.client() as client:
        return set(client.info("errorstats"))


class _Guard:
    """A counter of how often two bodies were inside at once."""

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self.overlaps = 0

    def visit(self) -> None:
        if not self._inside.acquire(blocking=False):
            self.overlaps += 1
            return
        time.sleep(0.005)
        self._inside.release()


def _contend(url: str, name: LockName, guard: _Guard, stop: threading.Event) -> int:
    party = Party(url, timeout=5)
    lock_client: LockClient = party.lock_client
    count = 0
    while not stop.is_set():
        context = party.new_context()
        lease = lock_client.acquire_within(name, context, 30.0, AcquireRequest(context.requester), 10.0)
        assert isinstance(lease, Lease), lease
        guard.visit()
        assert lock_client.renew(lease, 30.0)
        assert lock_client.release(lease, context)
        count += 1
    assert party.lost == []
    party.store.close()
    return count


def _queue(url: str, keys: LockKeys, stop: threading.Event) -> int:
    store = cast("RedisStore", store_at(url, timeout=5))
    count = 0
    while not stop.is_set():
        first, second = f"a{count}", f"b{count}"
        queue_helpers.take(store, f"{first}.1", first, name_in(keys))
        queue_helpers.park(store, f"{second}.1", second, name_in(keys))
        granted = store.release(name_in(keys), f"{first}.1", queue_helpers.ending(first)).granted
        assert isinstance(granted, Grant)
        assert granted.identity == queue_helpers.digest(second)
        assert store.confirm_publish(name_in(keys), granted.identity, queue_helpers.TURN)
        assert isinstance(
            queue_helpers.ask(store, f"{second}.2", second, name_in(keys), parks=True, grant_id=granted.grant_id),
            Acquired,
        )
        assert store.release(name_in(keys), f"{second}.2", queue_helpers.ending(second)).ours
        count += 1
    store.close()
    return count


class TestAddressesGivenAgain:
    """The server at an address may be another than before."""

    @pytest.mark.invariant("foreign-node-gets-no-lock")
    def test_foreign_node_at_a_dead_nodes_address_gets_no_lock_and_changes_no_map(
        self, own_cluster: Callable[..., ClusterSet], keeping: Callable[[ClusterSet], Keeping]
    ) -> None:
        """Expected: its slots' locks are refused, the others' go on; not one key reaches it, however often one asks."""
        cluster = own_cluster(replicas=0, options=("--cluster-require-full-coverage", "no"))
        names = [shared_name(f"n{n}") for n in range(30)]
        party = keeping(cluster)
        dead = cluster.node_of(key_slot(keys(names[0]).encode()))
        theirs = [name for name in names if cluster.node_of(key_slot(keys(name).encode())) is dead]
        others = [name for name in names if name not in theirs]
        assert theirs
        assert others
        party.hold(names, ttl=60)
        with taken_over(dead) as intruder:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                for name in theirs:
                    with pytest.raises(StoreUnavailable):
                        asked(party, name)
                assert [type(asked(party, name)) for name in others] == [Held] * len(others)
            assert ask(intruder, "KEYS", "*") == []

    @pytest.mark.invariant("foreign-cluster-is-refused")
    def test_a_cluster_made_anew_is_refused_loudly_until_a_restart(
        self,
        own_cluster: Callable[..., ClusterSet],
        keeping: Callable[[ClusterSet], Keeping],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        cluster = own_cluster(replicas=0)
        party, name = keeping(cluster), shared_name("x")
        party.hold([name], ttl=60)
        for node in cluster.nodes:
            node.kill()
            (node.folder / "nodes.conf").unlink()
            node.start()
        cluster._form()
        for _ in range(20):
            with pytest.raises(StoreUnavailable, match="if the Cluster was replaced on purpose, restart this process"):
                asked(party, name)
        assert [ask(node, "KEYS", "*") for node in cluster.nodes] == [[], [], []]
        errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        assert errors[0].startswith("no node reports a slot map of the Redis Cluster in use, keeping the last one: ")
        assert isinstance(asked(keeping(cluster), name), Lease), "a process that starts accepts it"

    @pytest.mark.invariant("foreign-cluster-is-refused")
    def test_a_node_that_left_by_soft_reset_takes_no_process_along(
        self,
        own_cluster: Callable[..., ClusterSet],
        keeping: Callable[[ClusterSet], Keeping],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It keeps its id, answers for all slots, and is one of the nodes that each process knows.

        One process was idle meanwhile: nothing speaks against its map, because the node answers for its old slots, too.
        """
        monkeypatch.setattr(cluster_members, "CONFIRM", 0.2)
        cluster = own_cluster(replicas=0)
        left, names = cluster.nodes[-1], NAMES[:6]
        theirs = [name for name in names if name in on(cluster, left)]
        assert theirs
        holder, idle, rival = (keeping(cluster) for _ in range(3))
        holder.hold(names, ttl=60)
        assert {type(asked(one, name)) for one in (idle, rival) for name in names} == {Held}
        cluster.leave(left)
        assert {type(asked(idle, name)) for name in theirs} == {Held}
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            rival.store._topology.invalidate()  # type: ignore[attr-defined]  # as any connection that ends does
            assert {type(asked(rival, name)) for name in names} == {Held}
        assert holder.losses == {}
        assert ask(left, "KEYS", "*") == []

    def test_a_process_follows_failovers_of_most_primaries_that_it_did_not_see(
        self, own_cluster: Callable[..., ClusterSet], keeping: Callable[[ClusterSet], Keeping]
    ) -> None:
        cluster = own_cluster(replicas=3, node_timeout_ms=500)
        party = keeping(cluster)
        leases = party.hold(NAMES[:6], ttl=60)
        before = cluster.primaries()
        for node in before:
            cluster.fail_over(next(r for some in slots_of(myself(node)) for r in some), "manual")
        for node in before:
            left = cluster.id_of(node)
            node.kill()
            for other in cluster.nodes:
                if other.answering:
                    ask(other, "CLUSTER FORGET", left)
        late = keeping(cluster)
        eventually(lambda: {type(asked(party, name)) for name in NAMES[:6]} == {Held}, within=10)
        assert {type(asked(late, name)) for name in NAMES[:6]} == {Held}
        assert all(lease.held for lease in leases.values())


def asked(party: Keeping, name: LockName) -> object:
    context = party.new_context()
    return party.lock_client.acquire(name, context, 60, AcquireRequest(context.requester))


def keys(name: LockName) -> str:
    return LockKeys.of("dlock", name).lock


@contextmanager
def taken_over(dead: Server) -> Iterator[Server]:
    """A whole Cluster of one node, where another one's node was."""
    assert dead.port is not None
    port = dead.port
    dead.kill()
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
    with Server(dead.folder.with_name("intruder"), options=options, pick_port=lambda: port, rights=dead.rights) as node:
        ask(node, "CLUSTER ADDSLOTS", *range(16384))
        eventually(lambda: ask(node, "CLUSTER INFO")["cluster_state"] == "ok")
        yield node
