"""A network that drops and duplicates, between the lock client and a real server."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest
import redis

from celery_dlock.errors import ReplyLost, StoreUnavailable
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.lease_table import LeaseState
from celery_dlock.store.model import AcquireRequest, Identity, Tombstoned
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import SCRIPTS, Script
from tests.contract.helpers import TTL, Party, commands_seen, cut_reply, ending_of, request_of
from tests.support.polling import eventually
from tests.support.proxy import Mode, Proxy
from tests.support.scripts import shas

NAME = shared_name("x")
KEYS = LockKeys.of("dlock", NAME)
TIMEOUT = 0.5


@pytest.fixture
def party(proxy: Proxy) -> Iterator[Party]:
    """Connected through the proxy, and warm: no handshake and no missing script delays the test."""
    made = Party(proxy.url(), timeout=TIMEOUT)
    lease = made.acquire(NAME)
    made.lock_client.renew(lease, lease.ttl)
    made.lock_client.holder(NAME)
    made.release(lease)
    made.told.clear()
    yield made
    proxy.set_mode("pass")
    eventually(lambda: not made.lease_table.records(), within=10)


def sent(seen: list[tuple[str, list[str]]], script: Script) -> int:
    return sum(1 for kind, words in seen if kind != "lua" and words[0] == "EVALSHA" and words[1] in shas(script))


# An acquire whose reply is lost


@pytest.mark.invariant("store-calls-are-idempotent", "lost-replies-leave-no-lock")
@pytest.mark.core
def test_an_acquire_whose_reply_is_lost_ends_holding_one_lock_under_the_next_number(
    party: Party, proxy: Proxy, client: redis.Redis
) -> None:
    cut_reply(proxy, SCRIPTS["acquire"])
    with commands_seen(client) as seen:
        lease = party.acquire(NAME)
    assert lease.acquisition == f"{party.context.owner}.3"
    # A hold count of 1 is not stored.
    assert client.hmget(KEYS.lock, "acq", "count", "token") == [lease.acquisition, None, str(lease.token)]
    assert client.exists(KEYS.tombstone(f"{party.context.owner}.2"))
    # redis-py's own retries would show here: each command was sent once.
    assert (sent(seen, SCRIPTS["acquire"]), sent(seen, SCRIPTS["release"])) == (2, 1)
    assert [record.acquisition for record in party.lease_table.records()] == [lease.acquisition]
    assert party.release(lease)
    assert not client.exists(KEYS.lock)
    assert party.kinds_told() == ["acquired", "released"]


@pytest.mark.core
def test_an_acquire_whose_replies_are_all_lost_ends_holding_none(
    party: Party, proxy: Proxy, client: redis.Redis
) -> None:
    cut_reply(proxy, SCRIPTS["acquire"], times=2)
    with commands_seen(client) as seen, pytest.raises(ReplyLost):
        party.acquire(NAME)
    assert not client.exists(KEYS.lock)
    assert (sent(seen, SCRIPTS["acquire"]), sent(seen, SCRIPTS["release"])) == (2, 2)
    assert not party.lease_table.records()
    assert not party.told


@pytest.mark.invariant("store-calls-are-idempotent")
def test_an_old_acquire_that_arrives_after_its_tombstone_is_refused(
    party: Party, proxy: Proxy, client: redis.Redis
) -> None:
    """A command that the network held back reaches the server when the lock has been free for long."""
    proxy.set_mode("blackhole")
    with pytest.raises(StoreUnavailable):
        party.acquire(NAME)
    old = f"{party.context.owner}.2"
    proxy.set_mode("pass")
    eventually(lambda: client.exists(KEYS.tombstone(old)), within=10)
    eventually(lambda: not party.lease_table.records())
    assert not client.exists(KEYS.lock)
    assert party.store.acquire(NAME, old, TTL, request_of()) == Tombstoned()


@pytest.mark.parametrize("mode", ["refuse", "blackhole"])
def test_a_store_that_is_away_is_reported_within_the_timeouts_and_costs_no_lock(
    party: Party, proxy: Proxy, client: redis.Redis, mode: Mode
) -> None:
    proxy.set_mode(mode)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        party.acquire(NAME)
    # At most: the acquire, the connection for its release, and slow cores.
    assert time.monotonic() - started < 2 * TIMEOUT + 1
    proxy.set_mode("pass")
    eventually(lambda: not party.lease_table.records(), within=10, message="the watchdog did not give the lock back")
    assert not client.exists(KEYS.lock)
    assert party.release(party.acquire(NAME))


def test_a_store_that_never_was_there_costs_no_record(proxy: Proxy) -> None:
    proxy.set_mode("refuse")
    party = Party(proxy.url(), timeout=TIMEOUT)
    with pytest.raises(StoreUnavailable) as raised:
        party.acquire(NAME)
    assert not isinstance(raised.value, ReplyLost)
    assert not party.lease_table.records()


# Renewals and releases


@pytest.mark.core
def test_a_renewal_whose_reply_is_lost_is_sent_once_more_and_counts_once(
    party: Party, proxy: Proxy, client: redis.Redis
) -> None:
    lease = party.acquire(NAME)
    cut_reply(proxy, SCRIPTS["renew"])
    with commands_seen(client) as seen:
        assert party.acquire(NAME) is lease
    assert sent(seen, SCRIPTS["renew"]) == 2
    assert client.hget(KEYS.lock, "count") == "2"
    assert party.release(lease)
    assert client.hget(KEYS.lock, "count") == "1"
    assert party.release(lease)
    assert not client.exists(KEYS.lock)


def test_a_look_whose_reply_is_lost_is_taken_once_more(party: Party, proxy: Proxy) -> None:
    lease = party.acquire(NAME)
    cut_reply(proxy, SCRIPTS["inspect"])
    holder = party.lock_client.holder(NAME)
    assert holder is not None
    assert holder.token == lease.token
    party.release(lease)


@pytest.mark.core
def test_a_release_whose_reply_is_lost_frees_the_lock_and_reports_no_loss(
    party: Party, proxy: Proxy, client: redis.Redis
) -> None:
    lease = party.acquire(NAME)
    cut_reply(proxy, SCRIPTS["release"])
    with commands_seen(client) as seen:
        assert party.release(lease)
    assert sent(seen, SCRIPTS["release"]) == 2
    assert not client.exists(KEYS.lock)
    assert party.kinds_told() == ["acquired", "released"]


def test_a_release_whose_reply_is_lost_does_not_free_who_took_the_lock_meanwhile(
    party: Party, proxy: Proxy, client: redis.Redis, redis_url: str
) -> None:
    lease = party.acquire(NAME)
    other = Party(redis_url)
    proxy.set_mode("blackhole")
    release = threading.Thread(target=party.release, args=(lease,))
    release.start()
    client.delete(KEYS.lock)
    taken = other.acquire(NAME)
    proxy.set_mode("pass")
    release.join(10)
    assert client.hget(KEYS.lock, "acq") == taken.acquisition
    assert other.release(taken)


@pytest.mark.core
@pytest.mark.parametrize("mode", ["refuse", "blackhole"])
def test_release_while_the_store_is_away_runs_with_its_ending_when_it_is_back(
    party: Party, proxy: Proxy, client: redis.Redis, mode: Mode
) -> None:
    lease = party.acquire(NAME)
    client.hset(KEYS.lock, "dup", "1")
    proxy.set_mode(mode)
    started = time.monotonic()
    assert party.release(lease, ending_of("id1", used_ms=60_000))  # never raises, reports no loss
    assert time.monotonic() - started < 3 * TIMEOUT + 1
    assert [record.state for record in party.lease_table.records()] == [LeaseState.RELEASE_DELEGATED]
    assert client.exists(KEYS.lock)
    proxy.set_mode("pass")
    eventually(lambda: not party.lease_table.records(), within=10)
    assert not client.exists(KEYS.lock)
    assert client.exists(KEYS.done(Identity("id1").digest), KEYS.run()) == 2
    assert "lost" not in party.kinds_told()
    assert not party.lost


# All at once


class Crowd:
    """Each in the lock adds one to a plain number, slowly; an overlap or a stuck lock would lose some."""

    def __init__(self, proxy: Proxy, client: redis.Redis) -> None:
        self.proxy, self.client = proxy, client
        self.total = 0
        self.problems: list[str] = []
        self.over = threading.Event()

    def disturb(self) -> None:
        chance = random.Random(1)
        while not self.over.wait(0.003):
            cut_reply(
                self.proxy,
                chance.choice([SCRIPTS["acquire"], SCRIPTS["release"], SCRIPTS["renew"]]),
                times=chance.choice([1, 2]),
            )
        self.proxy.set_mode("pass")

    def member(self) -> None:
        party = Party(self.proxy.url(), timeout=5)
        done = 0
        while done < 25:
            with contextlib.suppress(StoreUnavailable):
                lease = party.lock_client.acquire_within(
                    NAME, party.context, 30.0, AcquireRequest(party.context.requester), 20
                )
                assert isinstance(lease, Lease)
                self.add(party, lease)
                done += 1
        eventually(lambda: not party.lease_table.records(), within=10)

    def add(self, party: Party, lease: Lease) -> None:
        seen = self.total
        if self.client.hget(KEYS.lock, "count") is not None:  # a hold count of 1 is not stored
            self.problems.append("a doubled count")
        time.sleep(0.001)
        self.total = seen + 1
        if not party.release(lease):
            self.problems.append("a loss was reported")


@pytest.mark.invariant("store-calls-are-idempotent")
def test_many_callers_behind_a_network_that_cuts_replies_never_overlap(proxy: Proxy, client: redis.Redis) -> None:
    """They leave no lock."""
    crowd = Crowd(proxy, client)
    threads = [threading.Thread(target=crowd.member) for _ in range(4)]
    disturbing = threading.Thread(target=crowd.disturb)
    for thread in [*threads, disturbing]:
        thread.start()
    for thread in threads:
        thread.join(60)
    crowd.over.set()
    disturbing.join()
    assert not crowd.problems
    assert crowd.total == 100
    assert not client.exists(KEYS.lock)
    assert client.keys("*tombstone*"), "no acquire was cut: this run proved nothing"
