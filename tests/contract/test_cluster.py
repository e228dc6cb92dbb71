"""A Cluster as one store: who is asked for what, while slots move and while they do not."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from redis.crc import key_slot

from celery_dlock.errors import StoreNotReady, StoreRefused
from celery_dlock.keys.key_spec import BUCKETS, LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Held, Renewal, Requester
from celery_dlock.store.redis.cluster.topology import Cluster
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract import queue_helpers
from tests.contract.helpers import TTL, keys_of, request_of, take
from tests.support.cluster_nodes import ask
from tests.support.polling import eventually
from tests.support.processes import free_port
from tests.support.servers import Server
from tests.support.stores import name_in, store_at
from tests.support.tls import TlsNode, make_certificates
from tests.support.topologies import ClusterSet

NAMES = [keys_of(f"n{n}") for n in range(30)]


@pytest.fixture
def topology() -> str:
    return "cluster"


@pytest.fixture
def other(lock_url: str) -> Iterator[RedisStore]:
    """A second process, which has its own map."""
    made = cast("RedisStore", store_at(lock_url, timeout=5))
    yield made
    made.close()


class Move:
    """The slot of a lock's keys on its way to another node."""

    def __init__(self, cluster: ClusterSet, keys: LockKeys) -> None:
        self.cluster = cluster
        self.slot = key_slot(keys.lock.encode())
        self.source = cluster.node_of(self.slot)
        self.to = next(node for node in cluster.primaries() if node is not self.source)

    def begin(self) -> None:
        self.cluster.begin_move(self.slot, self.to)

    def keys(self) -> None:
        self.cluster.move_keys(self.slot)

    def end(self) -> None:
        self.cluster.move_keys(self.slot)
        self.cluster.end_move(self.slot)


@pytest.fixture
def move(servers: ClusterSet) -> Iterator[Callable[[LockKeys], Move]]:
    """Slots that are put back behind the test."""
    begun: list[Move] = []

    def moving(keys: LockKeys) -> Move:
        begun.append(Move(servers, keys))
        return begun[-1]

    yield moving
    for one in begun:
        if one.slot in servers._moving:
            one.end()
        if servers.node_of(one.slot) is not one.source:
            servers.move_slot(one.slot, one.source)


def errors(node: Server, kind: str) -> int:
    """Return how often a node has answered so."""
    with node.client() as client:
        told = client.info("errorstats").get(f"errorstat_{kind}", "count=0")
    # redis-py 5.0 leaves a single field as the text "count=1".
    return int(told.removeprefix("count=") if isinstance(told, str) else told["count"])


def renewal(keys: LockKeys, acquisition: str) -> Renewal:
    return Renewal(name_in(keys), acquisition, TTL)


@pytest.mark.invariant("cluster-asks-primaries")
@pytest.mark.core
def test_each_key_is_asked_for_at_its_primary_and_no_replica_is_asked(store: RedisStore, servers: ClusterSet) -> None:
    for node in servers.nodes:
        with node.client() as client:
            client.config_resetstat()
    for keys in NAMES:
        take(store, "o.1", name=name_in(keys))
    assert store.renew([renewal(keys, "o.1") for keys in NAMES]) == [True] * len(NAMES)
    assert {store.inspect(name_in(keys)).owner for keys in NAMES} == {"o"}  # type: ignore[union-attr]
    for node in servers.nodes:
        with node.client() as client:
            stats = client.info("commandstats")
        if node in servers.primaries():
            assert stats["cmdstat_evalsha"]["calls"] > 10
        else:
            assert stats.get("cmdstat_evalsha") is None
        assert errors(node, "MOVED") == 0


class Written:
    """Asks whether keys exist, and notes when."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def send(self, wire: Any, calls: Sequence[Any]) -> None:
        self.steps.append("write")
        wire.send(b"".join([b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key.encode()) for key in calls]))

    def read(self, wire: Any, calls: Sequence[Any]) -> list[Any]:
        self.steps.append("read")
        return [(call, wire.read()) for call in calls]


@pytest.mark.invariant("cluster-asks-primaries")
def test_many_calls_are_one_write_per_node_and_all_written_before_any_is_read(store: RedisStore) -> None:
    talk = Written()
    keys = [f"dlock:{{{bucket:03x}}}:queues" for bucket in range(BUCKETS)]
    answers = store._topology.each(talk, [(key, key) for key in keys])
    assert answers == [(key, 0) for key in keys]
    assert talk.steps == ["write"] * 3 + ["read"] * 3


@pytest.mark.invariant("cluster-asks-primaries")
def test_every_bucket_is_swept_wherever_it_is(store: RedisStore) -> None:
    named = [keys_of(f"q{n}") for n in range(20)]
    for keys in named:
        queue_helpers.take(store, "a.1", "a", name_in(keys))
        queue_helpers.park(store, "b.1", "b", name_in(keys))
    found = store.list_due_queues(range(BUCKETS), 10, 3600)
    assert sorted(name.text for name in found) == sorted(keys.name for keys in named)


@pytest.mark.core
def test_nodes_that_one_store_has_heard_of_are_known_to_all_of_its_process(lock_url: str) -> None:
    """Else a watchdog that comes later knows of none, once those that the URL names are gone."""
    place = StoreLocation.of(lock_url)
    with closing(open_store((place,), timeout=5, prefix="dlock")) as first:
        take(cast("RedisStore", first), "o.1")
    gone = dataclasses.replace(place, addresses=(("127.0.0.1", free_port()),))
    with closing(open_store((gone,), timeout=5, prefix="dlock")) as later:
        for _ in range(2):
            assert later.renew([renewal(keys_of(), "o.1")]) == [True]
            later.close()  # as an idle watchdog does


class TestMoved:
    @pytest.mark.invariant("redirections-are-followed")
    @pytest.mark.core
    def test_a_slot_that_moved_is_found_and_asked_for_only_once_at_its_old_owner(
        self, store: RedisStore, move: Callable[[LockKeys], Move]
    ) -> None:
        keys = NAMES[0]
        take(store, "o.1", name=name_in(keys))
        moved = move(keys)
        moved.begin()
        moved.end()
        before = errors(moved.source, "MOVED")
        cast("Cluster", store._topology)._nodes._next_look = math.inf  # also while the map is not asked for again
        assert store.renew([renewal(keys, "o.1")]) == [True]
        for _ in range(3):
            assert isinstance(store.acquire(name_in(keys), "p.1", TTL, request_of()), Held)
        assert store.release(name_in(keys), "o.1", ReleaseRequest()).ours
        assert errors(moved.source, "MOVED") - before == 1

    def test_redirected_calls_of_many_are_answered_too(
        self, store: RedisStore, move: Callable[[LockKeys], Move]
    ) -> None:
        for keys in NAMES:
            take(store, "o.1", name=name_in(keys))
        for keys in NAMES[:4]:
            moved = move(keys)
            moved.begin()
            moved.end()
        assert store.renew([renewal(keys, "o.1") for keys in (*NAMES, keys_of("free"))]) == [True] * 30 + [False]


class TestHalfMoved:
    @pytest.mark.invariant("redirections-are-followed", "resharding-loses-no-lease")
    @pytest.mark.core
    def test_a_held_lock_is_renewed_on_both_sides_and_the_map_stays(
        self, store: RedisStore, move: Callable[[LockKeys], Move]
    ) -> None:
        keys = NAMES[1]
        take(store, "o.1", name=name_in(keys))
        moved = move(keys)
        moved.begin()
        assert store.renew([renewal(keys, "o.1")]) == [True]
        moved.keys()
        before = errors(moved.source, "ASK"), errors(moved.to, "MOVED")
        cast("Cluster", store._topology)._nodes._next_look = math.inf
        for _ in range(3):
            assert store.renew([renewal(keys, "o.1")]) == [True]
        assert store.inspect(name_in(keys)).owner == "o"  # type: ignore[union-attr]
        # Each of them was sent on by the owner: the slot is still its own.
        assert (errors(moved.source, "ASK"), errors(moved.to, "MOVED")) == (before[0] + 4, before[1])
        moved.end()

    def test_a_new_owner_that_hangs_costs_the_others_one_wait_and_not_one_for_each_lease(
        self, store: RedisStore, move: Callable[[LockKeys], Move], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = [LockKeys.of("dlock", LockName(f"many{n}", 77)) for n in range(30)]
        moved = move(bucket[0])
        elsewhere = next(k for k in NAMES if moved.cluster.node_of(key_slot(k.lock.encode())) is not moved.to)
        for keys in (*bucket, elsewhere):
            take(store, "o.1", name=name_in(keys))
        moved.begin()
        moved.keys()
        nodes = cast("Cluster", store._topology)._nodes
        call, asked = nodes.call, []

        def noted(address: Any, *words: Any, **options: Any) -> Any:
            asked.append((address[1], options.get("asking", False)))  # else it is asked for the map
            return call(address, *words, **options)

        monkeypatch.setattr(nodes, "call", noted)
        moved.to.pause()
        answers = store.renew([renewal(keys, "o.1") for keys in (*bucket, elsewhere)], 0.3)
        moved.to.resume()
        assert answers == [None] * 30 + [True]
        assert asked.count((moved.to.port, True)) == 1

    def test_a_script_that_the_new_owner_has_not_seen_is_sent_there_in_full(
        self, store: RedisStore, move: Callable[[LockKeys], Move]
    ) -> None:
        keys = NAMES[2]
        take(store, "o.1", name=name_in(keys))
        moved = move(keys)
        moved.begin()
        moved.keys()
        with moved.to.client() as client:
            client.script_flush()
        assert store.inspect(name_in(keys)).owner == "o"  # type: ignore[union-attr]
        with moved.to.client() as client:
            client.script_flush()
        assert store.renew([renewal(keys, "o.1")]) == [True]

    @pytest.mark.invariant("redirections-are-followed", "resharding-loses-no-lease")
    @pytest.mark.core
    def test_call_on_several_keys_waits_until_they_are_on_one_node(
        self, store: RedisStore, move: Callable[[LockKeys], Move]
    ) -> None:
        keys = NAMES[3]
        take(store, "o.1", name=name_in(keys))
        moved = move(keys)
        moved.begin()
        moved.keys()
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            released = pool.submit(store.release, name_in(keys), "o.1", ReleaseRequest())
            eventually(lambda: errors(moved.to, "TRYAGAIN") > 3)
            assert not released.done()
            moved.end()
            assert released.result(5).ours
            assert time.monotonic() - began < 5
        take(store, "p.1", name=name_in(keys))

    def test_it_waits_no_longer_than_a_call_may_take_and_says_why(
        self, lock_url: str, store: RedisStore, move: Callable[[LockKeys], Move]
    ) -> None:
        keys = NAMES[4]
        take(store, "o.1", name=name_in(keys))
        moved = move(keys)
        moved.begin()
        hasty = store_at(lock_url, timeout=0.3)
        began = time.monotonic()
        with pytest.raises(StoreNotReady, match="its cluster is moving this key"):
            hasty.release(name_in(keys), "o.1", ReleaseRequest())
        assert 0.2 < time.monotonic() - began < 1.5
        hasty.close()
        assert store.inspect(name_in(keys))

    @pytest.mark.invariant("redirections-are-followed", "resharding-loses-no-lease")
    @pytest.mark.parametrize("moved_first", [False, True], ids=["before", "behind"])
    def test_no_script_is_cut_off_half_done(
        self, store: RedisStore, client: Any, move: Callable[[LockKeys], Move], lock_url: str, moved_first: bool
    ) -> None:
        """All keys that it works on are in one place, but it deletes one: the next look at that key is refused."""
        keys = NAMES[5]
        queue_helpers.take(store, "a.1", "a", name_in(keys))
        for waiter in "bcd":
            queue_helpers.park(store, f"{waiter}.1", waiter, name_in(keys))
        store.release(name_in(keys), "a.1", queue_helpers.ending("a"))
        assert queue_helpers.lose_turn(store, client, "b", keys) == ""
        assert queue_helpers.lose_turn(store, client, "c", keys, tries=1)  # a dead letter
        assert store.confirm_publish(name_in(keys), queue_helpers.digest("d"), 60_000)
        queue_helpers.make_due(client, keys)
        client.zadd(keys.queue()[0], {queue_helpers.digest("e"): 1})
        every = [keys.lock, *keys.queue(), keys.named("dead")]
        assert client.exists(*every) == 6
        before = [client.dump(key) for key in every if key != keys.lock]
        moved = move(keys)
        moved.begin()
        if moved_first:
            moved.keys()
        hasty = store_at(lock_url, timeout=0.2)
        with pytest.raises(StoreNotReady, match="moving this key"):
            hasty.sweep(name_in(keys), "s.1", 60_000, 5)  # type: ignore[attr-defined]
        hasty.close()
        moved.end()
        assert [client.dump(key) for key in every if key != keys.lock] == before
        assert client.hget(keys.lock, "acq") == f"grant:{queue_helpers.digest('d')}"


class TestWaking:
    @pytest.mark.invariant("waiters-wake-across-slots")
    @pytest.mark.core
    def test_release_wakes_the_waiter_at_the_owner_of_the_slot(self, store: RedisStore, other: RedisStore) -> None:
        keys = NAMES[6]
        take(other, "o.1", name=name_in(keys))
        assert isinstance(store.acquire(name_in(keys), "p.1", TTL, request_of(notify=True)), Held)
        threading.Timer(0.1, other.release, (name_in(keys), "o.1", ReleaseRequest())).start()
        began = time.monotonic()
        assert store.release_listener(name_in(keys)).wait(5)
        assert time.monotonic() - began < 1

    @pytest.mark.invariant("waiters-wake-across-slots")
    @pytest.mark.parametrize("back", [False, True], ids=["there", "there and back"])
    def test_a_waiter_is_woken_also_when_the_slot_moved_meanwhile(
        self, store: RedisStore, other: RedisStore, servers: ClusterSet, move: Callable[[LockKeys], Move], back: bool
    ) -> None:
        keys = NAMES[7]
        take(other, "o.1", name=name_in(keys))
        listener = store.release_listener(name_in(keys))
        assert isinstance(store.acquire(name_in(keys), "p.1", TTL, request_of(notify=True)), Held)
        moved = move(keys)
        moved.begin()
        moved.end()
        if back:
            servers.move_slot(moved.slot, moved.source)
        assert isinstance(store.acquire(name_in(keys), "p.2", TTL, request_of(notify=True)), Held)
        threading.Timer(0.1, other.release, (name_in(keys), "o.1", ReleaseRequest())).start()
        began = time.monotonic()
        assert listener.wait(5)
        assert time.monotonic() - began < 1

    @pytest.mark.invariant("waiters-wake-across-slots")
    def test_waiter_that_blocks_while_its_slot_moves_is_woken_at_the_new_owner(
        self, store: RedisStore, other: RedisStore, servers: ClusterSet, move: Callable[[LockKeys], Move]
    ) -> None:
        """The old owner ends the BLPOP with MOVED within a second, and the waiter follows."""
        keys = NAMES[8]
        take(other, "o.1", name=name_in(keys))
        assert isinstance(store.acquire(name_in(keys), "p.1", TTL, request_of(notify=True)), Held)
        source = servers.node_of(key_slot(keys.lock.encode()))
        with ThreadPoolExecutor() as threads, source.client() as node:
            waiting = threads.submit(store.release_listener(name_in(keys)).wait, 20)
            eventually(lambda: node.info("clients")["blocked_clients"])
            moved = move(keys)
            moved.begin()
            moved.end()
            eventually(lambda: not node.info("clients")["blocked_clients"])
            other.release(name_in(keys), "o.1", ReleaseRequest())
            began = time.monotonic()
            assert waiting.result()
            assert time.monotonic() - began < 1

    @pytest.mark.invariant("waiters-wake-across-slots")
    def test_waiter_that_begins_to_wait_while_its_slot_migrates_is_woken(
        self, store: RedisStore, other: RedisStore, move: Callable[[LockKeys], Move]
    ) -> None:
        """The list does not exist yet, so the source answers ASK, and the waiter blocks at the target."""
        keys = NAMES[9]
        take(other, "o.1", name=name_in(keys))
        assert isinstance(store.acquire(name_in(keys), "p.1", TTL, request_of(notify=True)), Held)
        moved = move(keys)
        moved.begin()
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(store.release_listener(name_in(keys)).wait, 20)
            time.sleep(0.2)
            moved.end()
            other.release(name_in(keys), "o.1", ReleaseRequest())
            began = time.monotonic()
            assert waiting.result()
            assert time.monotonic() - began < 2


class TestWrongKind:
    @pytest.mark.invariant("wrong-topology-is-refused")
    def test_a_node_given_as_a_single_server_says_what_to_write(self, servers: ClusterSet) -> None:
        plain = store_at(servers.nodes[0].lock_url(), timeout=5)
        with pytest.raises(StoreRefused, match=r"a node of a Redis Cluster: let dlock_url begin with redis\+cluster"):
            plain.info()  # as a worker does at its start
        owned_by_others = [
            keys for keys in NAMES if servers.node_of(key_slot(keys.lock.encode())) is not servers.nodes[0]
        ]
        with pytest.raises(StoreRefused, match=r"let dlock_url begin with redis\+cluster://"):
            plain.inspect(name_in(owned_by_others[0]))
        plain.close()

    @pytest.mark.invariant("wrong-topology-is-refused")
    @pytest.mark.core
    def test_a_single_server_given_as_a_cluster_says_what_to_write(self, server: Server) -> None:
        store = store_at(server.lock_url().replace("redis://", "redis+cluster://").removesuffix("/0"), timeout=5)
        for use in (store.info, lambda: store.inspect(name_in(NAMES[0]))):
            with pytest.raises(StoreRefused, match=r"a single server and no node .* let dlock_url begin with redis://"):
                use()
        store.close()

    def test_nodes_of_which_none_is_there_are_no_answer_in_time(self, server: Server) -> None:
        store = store_at("redis+cluster://127.0.0.1:1,127.0.0.1:2", timeout=1)
        began = time.monotonic()
        with pytest.raises(Exception, match="the lock store did not answer"):
            store.inspect(name_in(NAMES[0]))
        assert time.monotonic() - began < 2


def test_key_of_a_wrong_type_ends_one_lease_and_no_other(store: RedisStore, client: Any) -> None:
    for keys in NAMES:
        take(store, "o.1", name=name_in(keys))
    client.delete(NAMES[3].lock)
    client.set(NAMES[3].lock, "not a lock")
    expected = [keys is not NAMES[3] for keys in NAMES]
    assert store.renew([renewal(keys, "o.1") for keys in NAMES]) == expected


@pytest.mark.invariant("absent-node-costs-only-its-locks")
def test_connections_to_one_node_that_were_cut_cost_no_call(store: RedisStore, servers: ClusterSet) -> None:
    def publication(task_id: str) -> ClaimRequest:
        return ClaimRequest(
            task_id, 0, TTL, refuse_while_running=False, requester=Requester("t", task_id, "n", "1"), attempt=task_id
        )

    for task_id in ("a", "b"):
        assert store.claim([(name_in(keys), publication(task_id)) for keys in NAMES]).count(None) == (
            30 if task_id == "a" else 0
        )
        ask(servers.nodes[0], "CLIENT KILL TYPE normal SKIPME yes")


def test_nodes_that_keep_nothing_any_more_are_forgotten(store: RedisStore) -> None:
    cluster = cast("Cluster", store._topology)
    store.info()
    nodes = cluster._nodes
    nodes.node(("127.0.0.1", 1))
    assert len(nodes._nodes) == 4
    nodes.invalidate()
    store.inspect(name_in(NAMES[0]))
    assert set(nodes._nodes) == set(nodes.primaries())


@pytest.mark.servers
def test_over_tls_each_node_is_asked_at_its_tls_port(own_cluster: Callable[..., ClusterSet], tmp_path: Path) -> None:
    make_certificates(tmp_path)
    cluster = own_cluster(certificates=tmp_path, replicas=0)
    ports = {cast("TlsNode", node).tls_port for node in cluster.nodes}
    places = ",".join(f"localhost:{port}" for port in ports)
    store = cast("RedisStore", store_at(f"rediss+cluster://{places}?ssl_ca_certs={tmp_path / 'ca.crt'}", timeout=5))
    nodes = cast("Cluster", store._topology)._nodes
    assert {port for _, port in nodes.primaries()} == ports
    for keys in NAMES:
        take(store, "o.1", name=name_in(keys))
    assert store.renew([renewal(keys, "o.1") for keys in NAMES]) == [True] * len(NAMES)
    store.close()
