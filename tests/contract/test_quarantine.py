"""A server that may have lost leases grants nothing new until those that it may have lost are over."""

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock.config.locations import locations_from_settings
from celery_dlock.errors import StoreNotReady
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.keys.lock_name import BUCKETS, LockName
from celery_dlock.runtime import Runtime
from celery_dlock.store.factory import open_store
from celery_dlock.store.model import Acquired, AcquireRequest, Held, Parked, QueueRequest, Renewal
from celery_dlock.store.redis.endpoint import ServerEndpoint
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.pool import ConnectionPool
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.store.server_model import Quarantine
from tests.contract.helpers import NAME, TTL, commands_seen, ending_of, keys_of, request_of, take
from tests.support.polling import eventually
from tests.support.replicas import ReplicaSet
from tests.support.servers import LOCK_USER, Server
from tests.support.stores import name_in
from tests.support.topologies import ClusterSet

DELAY = 0.6
SHORT, LONG = Quarantine(DELAY), Quarantine(3600)
_numbers = itertools.count()


@contextmanager
def at(url: str, probation: Quarantine | None) -> Iterator[RedisStore]:
    made = open_store(locations_from_settings(url, {}), timeout=10, prefix="dlock", quarantine=probation)
    assert isinstance(made, RedisStore)
    yield made
    made.close()


def ask(store: RedisStore, text: str = "", request: AcquireRequest | None = None) -> Any:
    """A new acquisition, of a new name unless one is given."""
    number = next(_numbers)
    return store.acquire(shared_name(text or f"n{number}"), f"o{number}.1", TTL, request or request_of())


def refusal(store: RedisStore, text: str = "", request: AcquireRequest | None = None) -> str:
    with pytest.raises(StoreNotReady) as raised:
        ask(store, text, request)
    return str(raised.value)


def in_office(store: RedisStore) -> None:
    """Wait until the server's quarantine is over in all buckets: that of the last one began last."""
    refusal(store)

    def granted() -> bool:
        number = next(_numbers)
        keys = LockKeys.of("dlock", LockName(f"last{number}", BUCKETS - 1))
        try:
            return isinstance(store.acquire(name_in(keys), f"o{number}.1", TTL, request_of()), Acquired)
        except StoreNotReady:
            return False

    eventually(granted, within=DELAY + 20)


@pytest.fixture
def store(clean_server: Server) -> Iterator[RedisStore]:
    """On an empty server, for the user who may keep locks and nothing else."""
    with at(clean_server.lock_url(), SHORT) as made:
        yield made


class TestBegins:
    def test_a_first_start_waits_and_says_for_how_long_and_why(self, store: RedisStore) -> None:
        began = time.monotonic()
        assert refusal(store) == (
            "the lock store was started, emptied or promoted to primary a moment ago: it grants nothing new for "
            "another 0.6 s, until the leases that it may have lost have expired (dlock_quarantine)"
        )
        eventually(lambda: _granted(store, "x"), within=DELAY + 20, every=0.01)
        assert time.monotonic() - began > DELAY

    def test_a_refused_acquire_changes_nothing(self, store: RedisStore, client: redis.Redis) -> None:
        refusal(store, "x", request_of("t", once=True, min_hold_ms=5000))
        assert {key.split(":")[2] for key in client.keys("dlock:*")} == {"quarantine"}

    def test_all_buckets_begin_with_the_first(self, store: RedisStore, client: redis.Redis) -> None:
        refusal(store)
        tills = [int(text.split()[2]) / 1e6 for text in client.mget(client.keys("dlock:*:quarantine"))]
        assert len(tills) == BUCKETS
        # One after the other, and not each when it is first asked for.
        assert max(tills) - min(tills) < 10

    @pytest.mark.invariant("quarantine-grants-nothing-new")
    @pytest.mark.parametrize("how", ["flushed", "this bucket's marker lost", "this bucket's marker overwritten"])
    def test_an_emptied_server_waits_anew(self, store: RedisStore, client: redis.Redis, how: str) -> None:
        in_office(store)
        if how == "flushed":
            client.flushall()
        else:
            key = keys_of("x").named("quarantine")
            client.delete(key) if "lost" in how else client.set(key, "garbage")
        refusal(store, "x")
        eventually(lambda: _granted(store, "x"), within=20)

    def test_server_out_of_quarantine_stays_out(self, store: RedisStore, clean_server: Server) -> None:
        in_office(store)
        with at(clean_server.lock_url(), SHORT) as other:
            assert all(isinstance(ask(other), Acquired) for _ in range(20))

    def test_client_with_longer_leases_extends_the_quarantine_from_its_beginning(
        self, store: RedisStore, clean_server: Server
    ) -> None:
        began = time.monotonic()
        in_office(store)
        length = time.monotonic() - began + 2
        with at(clean_server.lock_url(), Quarantine(length)) as knowing:
            refusal(knowing, "x")
            refusal(store, "x")
            eventually(lambda: _granted(knowing, "x"), within=length + 20, every=0.01)
            # What is asked for first is the last of the buckets to begin.
            assert length <= time.monotonic() - began < length + 20

    @pytest.mark.parametrize("asked_between", [False, True])
    def test_a_server_that_comes_into_office_a_second_time_in_one_run_waits_again(
        self, tmp_path: Path, *, asked_between: bool
    ) -> None:
        with ReplicaSet(tmp_path) as servers:
            first, second = servers.nodes
            with at(first.url(), SHORT) as store, first.client() as one, second.client() as two:
                in_office(store)
                two.replicaof("NO", "ONE")
                one.replicaof("127.0.0.1", str(second.port))
                eventually(lambda: one.info("replication")["master_link_status"] == "up", within=20)
                if asked_between:
                    with at(second.url(), SHORT) as other:
                        in_office(other)
                        eventually(
                            lambda: (
                                one.get(keys_of("x").named("quarantine")) == two.get(keys_of("x").named("quarantine"))
                            ),
                            within=20,
                        )
                one.replicaof("NO", "ONE")
                refusal(store, "x")
                eventually(lambda: _granted(store, "x"), within=20)

    def test_a_server_in_whose_place_another_was_meanwhile_waits_once(self, clean_server: Server) -> None:
        """It was paused, and woke as the primary that it had been: only who counts the failovers can tell."""
        door = ReplacedDoor(
            locations_from_settings(clean_server.lock_url(), {})[0].options_at(("127.0.0.1", clean_server.port))
        )
        store = RedisStore(ConnectionPool(door, timeout=10), "dlock", SHORT)
        in_office(store)
        door.count = 9
        in_office(store)
        door.count = 8  # from a sentinel that does not know of the last one
        assert all(isinstance(ask(store), Acquired) for _ in range(20))
        store.close()

    def test_a_clock_that_went_back_makes_it_no_longer(self, store: RedisStore, client: redis.Redis) -> None:
        in_office(store)
        run, copied, _, length, term = client.get(keys_of("x").named("quarantine")).split()
        seconds, _ = client.time()
        client.set(keys_of("x").named("quarantine"), f"{run} {copied} {(seconds + 3600) * 1_000_000} {length} {term}")
        refusal(store, "x")
        eventually(lambda: _granted(store, "x"), within=20)

    def test_store_without_a_quarantine_pays_nothing_for_it(self, clean_server: Server, client: redis.Redis) -> None:
        with at(clean_server.lock_url(), None) as plain:
            take(plain, "o.0", name=shared_name("before"))
            with commands_seen(client) as seen:
                take(plain, "o.1")
        assert not client.keys("*:quarantine")
        assert [words[0].lower() for kind, words in seen if kind == "lua" and words[0].lower() == "info"] == []

    def test_its_script_asks_for_no_right_but_those_of_locks(self, store: RedisStore) -> None:
        refusal(store)  # as that user: else it would be a StoreRefused


class ReplacedDoor(ServerEndpoint):
    """A primary whose failover epochs are counted."""

    count = 7

    def failover_epoch(self) -> int:
        return self.count


def _granted(store: RedisStore, text: str) -> bool:
    try:
        return isinstance(ask(store, text), Acquired)
    except StoreNotReady:
        return False


class TestMeanwhile:
    @pytest.mark.invariant("quarantine-grants-nothing-new", "quarantine-delays-grants")
    def test_a_promoted_replica_keeps_its_leases_and_grants_nothing_new(self, tmp_path: Path) -> None:
        with ReplicaSet(tmp_path) as servers:
            with at(servers.primary.url(), SHORT) as before:
                in_office(before)
                for text in ("kept", "freed", "held"):
                    take(before, f"{text}.1", name=shared_name(text))
                servers.wait_until_in_step()
                (promoted,) = servers.replicas
                servers.promote(promoted)
            with at(promoted.url(), LONG) as after:
                refusal(after, "new")
                assert after.renew([Renewal(shared_name("kept"), "kept.1", 10 * TTL)]) == [True]
                assert isinstance(ask(after, "held"), Held)
                assert after.inspect(shared_name("held")) is not None
                assert after.release(shared_name("freed"), "freed.1", ending_of("t")).ours
                refusal(after, "freed")
            with promoted.client() as client:
                for key in client.keys("dlock:*:quarantine"):
                    run, copied, till, _, term = client.get(key).split()
                    client.set(key, f"{run} {copied} {int(till) - 3700 * 1_000_000} 3600000 {term}")
                with at(promoted.url(), LONG) as after:
                    assert isinstance(ask(after, "freed"), Acquired)

    def test_granted_waiter_keeps_its_grant_in_quarantine(self, clean_server: Server, client: redis.Redis) -> None:
        with at(clean_server.lock_url(), None) as plain:
            take(plain, "h.1", request_of("holder"))
            waits = request_of("waiter", queue=QueueRequest("entry"))
            assert isinstance(plain.acquire(NAME, "w.1", TTL, waits), Parked)
            granted = plain.release(NAME, "h.1", ending_of("holder", queue=True)).granted
            assert granted is not None
        with at(clean_server.lock_url(), LONG) as store:
            mine = request_of("waiter", republished=True, queue=QueueRequest(grant_id=granted.grant_id))
            refusal(store, "x", mine)
            _, parked, *_ = keys_of().queue()
            assert client.hget(parked, granted.identity) == "entry"
            assert client.hget(keys_of().lock, "acq") == f"grant:{granted.identity}"
        with at(clean_server.lock_url(), None) as plain:
            assert isinstance(ask(plain, "x", mine), Acquired)

    def test_messages_are_parked_and_turns_are_made(self, clean_server: Server) -> None:
        with at(clean_server.lock_url(), None) as plain:
            take(plain, "h.1", request_of("holder"))
        with at(clean_server.lock_url(), LONG) as store:
            refusal(store)
            waits = request_of("waiter", queue=QueueRequest("entry"))
            assert isinstance(store.acquire(NAME, "w.1", TTL, waits), Parked)
            assert store.release(NAME, "h.1", ending_of("holder", queue=True)).granted is not None


Start = Callable[..., Server]


class TestRestarts:
    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("redlock", [False, True])
    def test_a_server_that_restarts_waits_with_its_data_or_without(
        self, own_server: Start, *, persistent: bool, redlock: bool
    ) -> None:
        probation = of_redlock(DELAY) if redlock else SHORT
        server = own_server(persistent=persistent)
        with at(server.url(), probation) as store:
            in_office(store)
            server.kill()
            server.start()
        with at(server.url(), probation) as store:
            in_office(store)

    @pytest.mark.invariant("quarantine-grants-nothing-new")
    @pytest.mark.parametrize("then", ["everysec", "always, but not while rewriting"])
    def test_a_server_that_lost_leases_waits_whatever_its_disk_is_set_to_now(
        self, own_server: Start, then: str
    ) -> None:
        """The setting at a restart does not show the setting at the time when a lease was written."""
        server = own_server(persistent=True)
        written = server.folder.with_name("written")
        with at(server.url(), of_redlock(DELAY)) as store, server.client() as client:
            if then == "everysec":
                client.config_set("appendfsync", "everysec")
            else:
                client.config_set("no-appendfsync-on-rewrite", "yes")
            in_office(store)
            take(store, "kept.1", name=shared_name("kept"))
            # With everysec, the server postpones its write while an fsync is under way.
            eventually(lambda: b"kept.1" in written_by(server), message="the lease is not on the disk")
            shutil.copytree(server.folder, written)  # all that is on the disk when the power fails
            take(store, "lost.1", name=shared_name("lost"))
            server.kill()
        shutil.rmtree(server.folder)
        written.rename(server.folder)
        server.start()
        with at(server.url(), of_redlock(3600.0)) as store, server.client() as client:
            client.acl_setuser(LOCK_USER, enabled=True, commands=["+config|get"])
            assert client.config_get("appendfsync") == {"appendfsync": "always"}
            refusal(store, "lost")
            assert isinstance(ask(store, "kept"), Held)


def written_by(server: Server) -> bytes:
    """Return the content of the server's append-only files."""
    return b"".join(file.read_bytes() for file in server.folder.rglob("*.aof") if file.is_file())


def of_redlock(delay: float) -> Quarantine:
    """As the members of a Redlock have it."""
    app = Celery("here", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url=["redis://a", "redis://b", "redis://c"], dlock_quarantine=delay)
    found = Runtime.of(app)._quarantine
    assert found is not None
    return found


def test_a_cluster_waits_as_one_and_grants_on_all_of_its_nodes(cluster_set: ClusterSet) -> None:
    cluster_set.flush()
    with at(cluster_set.lock_url(), SHORT) as store:
        refusal(store)
        nodes = [node.client() for node in cluster_set.primaries()]
        assert sum(len(node.keys("dlock:*:quarantine")) for node in nodes) == BUCKETS
        for node in nodes:
            node.close()
        eventually(lambda: all(_granted(store, f"c{n}-{next(_numbers)}") for n in range(50)), within=20)
