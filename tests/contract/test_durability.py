"""Declared durability: a lock counts when those have confirmed it who were asked to, and not before."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_dlock import InvalidLockOptions, StoreUnavailable, singleton_task
from celery_dlock.config.locations import locations_from_settings
from celery_dlock.errors import NotConfirmed
from celery_dlock.locking.lease import Lease
from celery_dlock.options.durability import Durability
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.factory import open_store
from celery_dlock.store.model import Acquired, AcquireRequest, Parked, QueueRequest, Renewal, Requester
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import NAME, TTL, Party, commands_seen, ending_of, keys_of, request_of, shared_name, take
from tests.support.polling import eventually
from tests.support.replicas import ReplicaSet
from tests.support.servers import LOCK_USER, Server
from tests.support.stores import store_at
from tests.support.topologies import ClusterSet

ONE, TWO = Durability(1, fsync=False, timeout_ms=800), Durability(2, fsync=False, timeout_ms=800)
#: For calls that succeed: the test does not wait for this limit, and other tests may keep the machine busy.
SURE, DISK = Durability(2, fsync=False, timeout_ms=5000), Durability(0, fsync=True, timeout_ms=5000)
DISKS = Durability(2, fsync=True, timeout_ms=5000)
SHORT = "only 0 of 1 replicas confirmed within 0.8 s (dlock_durability={'replicas': 1})"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaSet]:
    with ReplicaSet(tmp_path_factory.mktemp("durability"), replicas=2, persistent=True) as made:
        yield made


@pytest.fixture
def servers(shared: ReplicaSet) -> ReplicaSet:
    """A primary with an append-only file and two replicas, in step and empty."""
    shared.primary.flush()
    shared.wait_until_in_step()
    return shared


@pytest.fixture
def store(servers: ReplicaSet) -> Iterator[RedisStore]:
    made = store_at(servers.primary.url(), timeout=20)
    assert isinstance(made, RedisStore)
    yield made
    made.close()


Confirming = Callable[[Durability], RedisStore]


@pytest.fixture
def confirming(servers: ReplicaSet) -> Iterator[Confirming]:
    """Return stores whose writes need a confirmation."""
    with ExitStack() as stack:

        def made(durability: Durability) -> RedisStore:
            store = stack.enter_context(closing(store_at(servers.primary.url(), timeout=20, durability=durability)))
            assert isinstance(store, RedisStore)
            return store

        yield made


@pytest.fixture
def admin(servers: ReplicaSet) -> Iterator[redis.Redis]:
    with servers.primary.client() as client:
        yield client


@contextmanager
def paused(*nodes: Server) -> Iterator[None]:
    for node in nodes:
        node.pause()
    yield
    for node in nodes:
        node.resume()


def on(node: Server, text: str) -> tuple[Any, int]:
    """The token of a lock and its life, as this server knows them."""
    with node.client() as client:
        return client.hget(keys_of(text).lock, "token"), client.pttl(keys_of(text).lock)


def short_of(store: RedisStore) -> str:
    acquisition = f"{uuid.uuid4().hex}.1"
    with pytest.raises(NotConfirmed) as raised:
        store.acquire(NAME, acquisition, TTL, request_of())
    store.release(NAME, acquisition, ending_of("t", outcome_unknown=True))
    return str(raised.value)


class TestAcquire:
    def test_call_without_durability_sends_nothing_more(self, store: RedisStore, admin: redis.Redis) -> None:
        take(store, "o.0", name=shared_name("before"))
        with commands_seen(admin) as seen:
            take(store, "o.1")
        assert [words[0].upper() for kind, words in seen if kind != "lua"] == ["EVALSHA"]

    @pytest.mark.invariant("durability-is-confirmed")
    def test_the_wait_goes_with_the_script(self, confirming: Confirming, admin: redis.Redis) -> None:
        store = confirming(SURE)
        take(store, "o.0", name=shared_name("before"))
        with commands_seen(admin) as seen:
            take(store, "o.1")
        sent = [words for kind, words in seen if kind != "lua"]
        assert [sent[0][0], sent[1]] == ["EVALSHA", ["WAIT", "2", "5000"]]

    @pytest.mark.parametrize("durability", [SURE, DISK, DISKS])
    def test_a_script_that_was_forgotten_is_confirmed_too(
        self, confirming: Confirming, servers: ReplicaSet, admin: redis.Redis, durability: Durability
    ) -> None:
        admin.script_flush()
        token = take(confirming(durability), "o.1").token
        if durability.replicas:
            assert [on(node, "x")[0] for node in servers.replicas] == [str(token)] * 2

    @pytest.mark.invariant("durability-is-confirmed")
    def test_each_of_the_confirmations_counts(self, confirming: Confirming, servers: ReplicaSet) -> None:
        first, second = servers.replicas
        with paused(first):
            take(confirming(Durability(1, fsync=False, timeout_ms=5000)), "o.1", name=shared_name("one"))
            assert short_of(confirming(TWO)) == (
                "only 1 of 2 replicas confirmed within 0.8 s (dlock_durability={'replicas': 2})"
            )
            with paused(second):
                assert short_of(confirming(ONE)) == SHORT

    def test_disks_confirm_only_what_is_on_them(
        self, confirming: Confirming, servers: ReplicaSet, admin: redis.Redis
    ) -> None:
        with paused(*servers.replicas):
            take(confirming(DISK), "o.1", name=shared_name("local"))
            assert short_of(confirming(Durability(1, fsync=True, timeout_ms=150))) == (
                "only 0 of 1 replicas wrote to disk within 0.15 s (dlock_durability={'fsync': 1})"
            )
        admin.config_set("appendfsync", "no")
        try:
            local = short_of(confirming(Durability(0, fsync=True, timeout_ms=150)))
        finally:
            admin.config_set("appendfsync", "always")
        assert local == "the primary did not write to disk within 0.15 s (dlock_durability={'fsync': 'local'})"

    def test_a_server_without_an_append_only_file_confirms_no_disk(self, clean_server: Server) -> None:
        made = store_at(clean_server.url(), timeout=5, durability=DISK)
        assert isinstance(made, RedisStore)
        assert "appendonly is disabled" in short_of(made)
        made.close()

    def test_ttl_too_short_for_the_disks_of_replicas_is_refused(self, confirming: Confirming) -> None:
        store = confirming(DISKS)
        with pytest.raises(InvalidLockOptions) as raised:
            store.acquire(NAME, "o.1", 14_000, request_of())
        assert str(raised.value) == (
            "invalid ttl=14.0: expected seconds from 15 with dlock_durability={'fsync': 2}, because a replica reports "
            "once a second what it wrote to disk"
        )
        assert isinstance(store.acquire(NAME, "o.1", 15_000, request_of()), Acquired)

    def test_refused_call_waits_for_no_confirmation(
        self, store: RedisStore, confirming: Confirming, servers: ReplicaSet
    ) -> None:
        take(store, "o.1")
        with paused(*servers.replicas):
            answer = confirming(ONE).acquire(NAME, "o.2", TTL, request_of())
        assert not isinstance(answer, Acquired)

    def test_the_wait_ends_within_half_of_the_connections_timeout(self, servers: ReplicaSet) -> None:
        patient = Durability(1, fsync=False, timeout_ms=60_000)
        hasty = store_at(servers.primary.url(), timeout=2.0, durability=patient)
        with paused(*servers.replicas), pytest.raises(NotConfirmed, match=r"within 1 s"):
            hasty.acquire(NAME, "o.1", TTL, request_of())
        hasty.close()

    def test_user_without_the_permission_gets_an_error_and_holds_nothing(
        self, servers: ReplicaSet, admin: redis.Redis
    ) -> None:
        party = Party(servers.primary.lock_url(), timeout=20, durability=SURE)
        with pytest.raises(
            StoreUnavailable, match=r"a right is missing: grant what docs/reference/redis-keys-and-permissions.md lists"
        ):
            taken(party)
        assert party.lock_client.holder(shared_name("x")) is None
        admin.acl_setuser(LOCK_USER, enabled=True, commands=["+wait", "+waitaof"])
        try:
            assert taken(party).held
            assert taken(Party(servers.primary.lock_url(), timeout=20, durability=DISKS), name="disks").held
        finally:
            admin.acl_setuser(LOCK_USER, enabled=True, commands=["-wait", "-waitaof"])


def taken(party: Party, *, name: str = "x", ttl: float = 30.0, **facts: Any) -> Lease:
    request = AcquireRequest(party.context.requester, **facts)
    lease = party.lock_client.acquire(shared_name(name), party.context, ttl, request)
    assert isinstance(lease, Lease)
    return lease


@pytest.fixture
def party(servers: ReplicaSet) -> Party:
    """A lock client whose watchdog's thread is not started: the test is its scheduler."""
    made = Party(servers.primary.url(), timeout=20, durability=ONE)
    made.watchdog.wake = lambda: True  # type: ignore[method-assign]
    return made


class TestTakenBack:
    @pytest.mark.invariant("durability-is-confirmed", "unconfirmed-acquire-is-released")
    def test_unconfirmed_acquire_leaves_nothing_but_its_tombstone(
        self, party: Party, servers: ReplicaSet, admin: redis.Redis
    ) -> None:
        """Also where the lock is to be kept for a while after it was taken (``min_hold``)."""
        with paused(*servers.replicas), pytest.raises(NotConfirmed) as raised:
            taken(party, min_hold_ms=60_000)
        assert str(raised.value) == SHORT
        kinds = sorted(key.split(":")[2] for key in admin.keys("dlock:*"))
        assert (kinds, party.lease_table.records(), party.context.open_acquisitions) == (
            ["last", "tombstone"],
            [],
            {},
        )

    def test_the_next_try_is_as_good_as_the_first(self, party: Party, servers: ReplicaSet) -> None:
        with paused(*servers.replicas), pytest.raises(NotConfirmed):
            taken(party)
        assert taken(party).held


def test_a_message_is_parked_when_that_is_confirmed_and_keeps_its_place_until_then(
    store: RedisStore, confirming: Confirming, servers: ReplicaSet, admin: redis.Redis
) -> None:
    take(store, "h.1", request_of("holder"))
    waits = request_of("waiter", queue=QueueRequest("entry"))
    _, parked, *_ = keys_of().queue()
    with paused(*servers.replicas):
        with pytest.raises(NotConfirmed):
            confirming(ONE).acquire(NAME, "w.1", TTL, waits)
        assert admin.hvals(parked) == ["entry"]
    answer = confirming(SURE).acquire(NAME, "w.2", TTL, waits)
    assert isinstance(answer, Parked)
    assert (answer.position, admin.hlen(parked)) == (1, 1)


class TestRenewals:
    @pytest.mark.invariant("durability-is-confirmed")
    def test_shortfall_affects_only_the_leases_that_were_renewed(
        self, store: RedisStore, confirming: Confirming, servers: ReplicaSet
    ) -> None:
        for text in ("one", "lost", "two"):
            take(store, "o.1", name=shared_name(text))
        batch = [Renewal(shared_name(text), "o.2" if text == "lost" else "o.1", TTL) for text in ("one", "lost", "two")]
        one, two = confirming(Durability(1, fsync=False, timeout_ms=5000)), confirming(TWO)
        with paused(servers.replicas[0]):
            assert one.renew(batch) == [True, False, True]
            assert two.renew(batch) == [None, False, None]
            assert store.renew(batch) == [True, False, True]

    @pytest.mark.parametrize(
        ("durability", "words"), [(SURE, ["WAIT", "2", "5000"]), (DISK, ["WAITAOF", "1", "0", "5000"])]
    )
    def test_one_wait_goes_behind_the_batch(
        self, confirming: Confirming, admin: redis.Redis, durability: Durability, words: list[str]
    ) -> None:
        store = confirming(durability)
        for number in range(4):
            take(store, "o.1", name=shared_name(f"{number}"))
        batch = [Renewal(shared_name(f"{number}"), "o.1", TTL) for number in range(4)]
        store.renew(batch)  # loads the script
        with commands_seen(admin) as seen:
            assert store.renew(batch) == [True] * 4
        assert [sent for kind, sent in seen if kind != "lua" and sent[0] != "EVALSHA"] == [words]

    def test_a_renewal_that_the_server_had_forgotten_is_confirmed_too(
        self, confirming: Confirming, servers: ReplicaSet, admin: redis.Redis
    ) -> None:
        store = confirming(SURE)
        take(store, "o.1")
        admin.script_flush()
        assert store.renew([Renewal(NAME, "o.1", 10 * TTL)]) == [True]
        assert all(on(node, "x")[1] > 9 * TTL for node in servers.replicas)

    @pytest.mark.invariant("unconfirmed-acquire-is-released")
    def test_unconfirmed_renewal_does_not_move_the_deadline_and_the_loss_is_reported(
        self, party: Party, servers: ReplicaSet, admin: redis.Redis
    ) -> None:
        lease = taken(party, ttl=3.0)
        ends = lease.record.deadline
        with paused(*servers.replicas):
            while not lease.lost:
                assert time.monotonic() < ends, "the lease was over before its holder was told"
                party.watchdog.run_round()
                time.sleep(0.05)
        assert lease.record.deadline == ends
        assert party.lost == ["no renewal was confirmed before its deadline: too few servers confirmed the renewal"]
        assert admin.exists(keys_of().lock), "nobody else could have had it yet"

    def test_unconfirmed_extension_does_not_move_the_deadline(self, party: Party, servers: ReplicaSet) -> None:
        lease = taken(party)
        ends = lease.record.deadline
        with paused(*servers.replicas):
            with pytest.raises(StoreUnavailable, match="too few servers confirmed the renewal"):
                lease.extend(100)
            with pytest.raises(StoreUnavailable, match="too few servers confirmed the renewal"):
                taken(party)  # to enter it again
            lease.ensure()
        assert (lease.record.deadline, lease.lost, lease.hold_count) == (ends, False, 1)


class TestEndsAndClaims:
    @pytest.mark.invariant("unconfirmed-acquire-is-released")
    def test_a_release_that_is_not_confirmed_is_one_and_warns_once(
        self, store: RedisStore, confirming: Confirming, servers: ReplicaSet, caplog: pytest.LogCaptureFixture
    ) -> None:
        releasing = confirming(ONE)
        with paused(*servers.replicas):
            for text in ("a", "b"):
                take(store, "o.1", request_of("t"), name=shared_name(text))
                assert releasing.release(shared_name(text), "o.1", ending_of("t")).ours
        told = [record.getMessage() for record in caplog.records]
        assert told == [f"{keys_of('a').name}: a failover may forget that a run has ended: {SHORT}"]

    def test_the_mark_of_a_success_is_on_the_replicas_when_the_release_is_answered(
        self, confirming: Confirming, servers: ReplicaSet
    ) -> None:
        store = confirming(SURE)
        take(store, "o.1", request_of("t", once=True))
        store.release(NAME, "o.1", ending_of("t", once=True, used_ms=TTL))
        for node in servers.replicas:
            with node.client() as client:
                assert client.get(keys_of().run()).startswith("used\n")

    def test_a_claim_that_is_not_confirmed_is_given_up(self, servers: ReplicaSet, admin: redis.Redis) -> None:
        def body() -> None: ...

        def task(timeout: float) -> Any:
            app = Celery("claims", broker="memory://", set_as_current=False)
            app.conf.update(dlock_url=servers.primary.url(), dlock_timeout=20)
            app.conf.dlock_durability = {"replicas": 1, "timeout": timeout}
            made: Any = singleton_task(app=app, name="claims.post", unique="queued", on_duplicate="raise")
            return made(body)

        with paused(*servers.replicas), pytest.raises(NotConfirmed):
            task(0.4).apply_async()
        eventually(lambda: not admin.keys("dlock:*:claim:*"), within=20, message="the claim stays")
        task(5).apply_async()

    def test_group_claim_confirms_only_the_claims_that_were_made(
        self, store: RedisStore, confirming: Confirming, servers: ReplicaSet
    ) -> None:
        def publication(task_id: str) -> ClaimRequest:
            return ClaimRequest(task_id, 0, TTL, False, Requester("t", task_id, "n", "1"), f"attempt-{task_id}")

        store.claim([(shared_name("a"), publication("first"))])
        claiming = confirming(ONE)
        with paused(*servers.replicas):
            (first,) = claiming.claim([(shared_name("a"), publication("second"))])
            assert first is not None
            with pytest.raises(NotConfirmed):
                claiming.claim([(shared_name("a"), publication("third")), (shared_name("b"), publication("b"))])


def test_cluster_node_waits_for_its_own_replica(cluster_set: ClusterSet) -> None:
    cluster_set.flush()
    names, sure = [f"n{number}" for number in range(30)], Durability(1, fsync=False, timeout_ms=5000)
    batch = [Renewal(shared_name(text), "o.1", TTL) for text in names]
    with closing(store_at(cluster_set.url(), timeout=20, durability=sure)) as store:
        for text in names:
            assert isinstance(store.acquire(shared_name(text), "o.1", TTL, request_of()), Acquired)
        assert store.renew(batch) == [True] * 30
    with closing(store_at(cluster_set.url(), timeout=20, durability=TWO)) as store:
        with pytest.raises(NotConfirmed, match="only 1 of 2 replicas"):
            store.acquire(shared_name("short"), "o.1", TTL, request_of())
        assert store.renew(batch) == [None] * 30


class TestFailover:
    @pytest.mark.invariant("confirmed-locks-survive-failover")
    def test_every_confirmed_lock_is_on_the_replica_that_is_promoted(self, tmp_path: Path) -> None:
        with ReplicaSet(tmp_path) as servers:
            one = Durability(1, fsync=False, timeout_ms=5000)
            store = store_at(servers.primary.url(), timeout=20, durability=one)
            held: dict[str, tuple[int, float]] = {}

            def grab(which: int) -> None:
                for number in range(which, 100, 4):
                    sent = time.monotonic()
                    taken = store.acquire(shared_name(f"{number}"), "o.1", 60_000, request_of())
                    assert isinstance(taken, Acquired)
                    held[f"{number}"] = taken.token, sent

            threads = [threading.Thread(target=grab, args=(which,)) for which in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            (promoted,) = servers.replicas
            servers.promote(promoted)
            found = {text: on(promoted, text) for text in held}
            assert {text: int(token or 0) for text, (token, _) in found.items()} == {t: k for t, (k, _) in held.items()}
            # The replica's clock is this machine's: what its holder believes is true there.
            now = time.monotonic()
            assert all(life / 1000 >= 60 - (now - held[text][1]) - 0.001 for text, (_, life) in found.items())
            assert len(found) == 100
            after = open_store(locations_from_settings(promoted.url(), {}), timeout=20, prefix="dlock")
            refused = [after.acquire(shared_name(t), "p.1", TTL, request_of()) for t in held]
            assert not any(isinstance(answer, Acquired) for answer in refused)

    @pytest.mark.invariant("failover-loss-is-reported")
    def test_a_lock_that_only_the_primary_knew_is_lost(self, tmp_path: Path) -> None:
        """Why dlock_durability="primary" promises nothing about a failover."""
        with ReplicaSet(tmp_path) as servers:
            store = store_at(servers.primary.url(), timeout=20)
            (replica,) = servers.replicas
            servers.cut_off(replica)
            take(store, "o.1")
            with pytest.raises(NotConfirmed):
                store_at(servers.primary.url(), timeout=20, durability=ONE).acquire(
                    shared_name("sure"), "o.1", TTL, request_of()
                )
            servers.promote(replica)
            take(store_at(replica.url(), timeout=20), "o.2")
