"""A majority of independent servers as one store: what it bears, what it refuses, and what it leaves behind."""

import _thread
import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psutil
import pytest
from celery.app.trace import build_tracer
from redis import CredentialProvider

from celery_dlock import singleton_task
from celery_dlock.config.locations import locations_from_settings
from celery_dlock.errors import InvalidLockOptions, LockLost, ReplyLost, StoreUnavailable
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking.lease import Lease
from celery_dlock.runtime import Runtime
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.factory import open_store
from celery_dlock.store.model import (
    Acquired,
    AcquireRequest,
    Duplicate,
    Held,
    Identity,
    NoMajority,
    Quarantine,
    QueueRequest,
    Renewal,
    Unknown,
    Used,
)
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import AGREE
from celery_dlock.store.redlock.store import RedlockStore
from tests.contract.helpers import NAME, TTL, Party, claim_of, ending_of, keys_of
from tests.contract.test_interruptions import Strike, assert_no_doubt, run
from tests.support.polling import eventually
from tests.support.processes import ROOT
from tests.support.proxy import Proxy
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server
from tests.support.stores import name_in, store_at
from tests.support.topologies import RedlockSet

KEYS = keys_of()
#: Seconds: long for a server that is well on a busy machine, and short for one that hangs.
TIMEOUT = 2.0


@pytest.fixture(scope="module")
def own_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedlockSet]:
    """Five servers that keep their data, for tests that break some; each finds them whole and empty."""
    with RedlockSet(tmp_path_factory.mktemp("redlock"), nodes=5, persistent=True) as made:
        yield made


@pytest.fixture
def five(own_set: RedlockSet) -> RedlockSet:
    for node in own_set.nodes:
        if not node.running:
            node.start()
        node.resume()
    own_set.flush()
    return own_set


def opened(nodes: Sequence[Server | Proxy], **options: Any) -> RedlockStore:
    urls = [f"redis://{LOCK_USER}:{LOCK_PASSWORD}@127.0.0.1:{node.port}/0" for node in nodes]
    return open_store(locations_from_settings(urls, {}), **{"timeout": TIMEOUT, "prefix": "dlock", **options})  # type: ignore[return-value]


@pytest.fixture
def store(five: RedlockSet) -> Iterator[RedlockStore]:
    with closing(opened(five.nodes)) as made:
        yield made


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


def took(store: RedlockStore, acquisition: str, claim: AcquireRequest | None = None) -> Acquired:
    answer = store.acquire(NAME, acquisition, TTL, claim or claim_of())
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
        assert isinstance(alone.acquire(NAME, acquisition, TTL, claim_of()), Acquired)


# Who may fail


def test_a_late_mark_is_a_majority_s(five: RedlockSet, store: RedlockStore) -> None:
    for node in five.nodes[:2]:
        node.kill()
    store.mark_done(NAME, Identity("id1").digest, "o", 60_000_000)
    assert store.acquire(NAME, "o.1", TTL, claim_of("id1", redelivered=True)) == Duplicate()
    five.nodes[2].kill()
    with pytest.raises(StoreUnavailable):
        store.mark_done(NAME, Identity("id2").digest, "o", 0)


@pytest.mark.invariant("redlock-survives-a-minority")
@pytest.mark.parametrize("way", ["kill", "pause"])
def test_with_two_of_five_away_everything_goes_on(five: RedlockSet, store: RedlockStore, way: str) -> None:
    for node in five.nodes[:2]:
        getattr(node, way)()
    took(store, "o.1", claim_of("id1", once=True))
    assert isinstance(store.acquire(NAME, "p.1", TTL, claim_of("id2")), Held)
    assert store.renew([Renewal(NAME, "o.1", TTL)]) == [True]
    holder = store.inspect(NAME)
    assert holder is not None
    assert holder.task_id == "id1"
    assert store.release(NAME, "o.1", ending_of("id1", used_ms=TTL, once=True)).ours
    used = store.use(NAME)
    assert used is not None
    assert used.state == "used"
    assert isinstance(store.acquire(NAME, "p.2", TTL, claim_of("id2", once=True)), Used)
    assert store.forget(NAME)
    took(store, "p.3", claim_of("id2", once=True))


@pytest.mark.invariant("redlock-needs-a-majority")
def test_with_three_of_five_away_nobody_gets_it_and_the_error_names_them(five: RedlockSet, store: RedlockStore) -> None:
    for node in five.nodes[:3]:
        node.kill()
    with pytest.raises(StoreUnavailable, match="no majority of its 5 servers") as caught:
        store.acquire(NAME, "o.1", TTL, claim_of())
    assert all(f"127.0.0.1:{node.port}" in str(caught.value) for node in five.nodes[:3])
    assert LOCK_PASSWORD not in str(caught.value)
    assert holders(five.nodes[3:]) == [None, None]
    for ask in (lambda: store.inspect(NAME), lambda: store.use(NAME), lambda: store.forget(NAME), store.facts):
        with pytest.raises(StoreUnavailable, match="no majority"):
            ask()
    for node in five.nodes[:3]:
        node.start()
    eventually(lambda: _acquired(store, "o"), within=15)


def test_three_hung_servers_cost_a_tenth_of_the_ttl_and_late_leases_are_released(
    five: RedlockSet, store: RedlockStore
) -> None:
    took(store, "w.1")
    store.release(NAME, "w.1", ReleaseRequest())
    for node in five.nodes[:3]:
        node.pause()
    began = time.monotonic()
    with pytest.raises(ReplyLost):
        store.acquire(NAME, "o.1", 5_000, claim_of())
    assert time.monotonic() - began < 1.5  # of the timeout's 2 s
    for node in five.nodes[:3]:
        node.resume()
    eventually(lambda: holders(five.nodes) == [None] * 5)


def test_a_hung_server_is_soon_asked_no_more_and_gives_back_what_it_took(five: RedlockSet, store: RedlockStore) -> None:
    took(store, "w.1")
    store.release(NAME, "w.1", ReleaseRequest())
    five.node(4).pause()
    for number in range(20):
        took(store, f"o.{number}")
        store.release(NAME, f"o.{number}", ReleaseRequest())
    threads = psutil.Process().num_threads()
    began = time.monotonic()
    for number in range(20):
        took(store, f"p.{number}")
        store.release(NAME, f"p.{number}", ReleaseRequest())
    assert time.monotonic() - began < 20 * 0.1
    assert psutil.Process().num_threads() <= threads + 4
    five.node(4).resume()
    eventually(lambda: holders(five.nodes) == [None] * 5)

    def takes_part() -> bool:
        acquisition = f"q.{uuid.uuid4()}"
        took(store, acquisition)
        found = holders([five.node(4)])
        store.release(NAME, acquisition, ReleaseRequest())
        return found == [acquisition]

    eventually(takes_part, within=15)
    eventually(lambda: holders(five.nodes) == [None] * 5)


def test_lease_taken_late_by_a_hung_server_is_released_after_a_refusal(five: RedlockSet) -> None:
    """Else the next server that dies is one too many, as long as the ttl."""
    hung = five.node(4)
    for node in five.nodes[:4]:
        hold(node, "held.1")
    with closing(opened(five.nodes, timeout=0.5)) as refused:
        took_elsewhere = keys_of("elsewhere")
        refused.acquire(name_in(took_elsewhere), "o.0", TTL, claim_of())  # connected
        refused.release(name_in(took_elsewhere), "o.0", ReleaseRequest())
        hung.pause()
        assert isinstance(refused.acquire(NAME, "o.1", TTL, claim_of()), Held)
        eventually(lambda: not refused._nodes.all[4]._out, within=10)  # given up, and in the server's queue
        hung.resume()
        eventually(lambda: refused.inspect(NAME) is not None and holders([hung]) == [None], within=15)


def test_replies_that_are_cut_cost_nobody_the_lock_and_leave_nothing(five: RedlockSet) -> None:
    """Two of five carry out and do not answer, in turn, at each step."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in five.nodes]
        store = stack.enter_context(closing(opened(proxies)))
        for number in range(10):
            for proxy in (proxies[number % 5], proxies[(number + 1) % 5]):
                proxy.set_mode("cut_reply", times=2, containing=b"EVALSHA")
            took(store, f"o.{number}")
            assert store.release(NAME, f"o.{number}", ReleaseRequest()).ours
            eventually(lambda: holders(five.nodes) == [None] * 5)
            for proxy in proxies:
                proxy.set_mode("pass")


def test_server_skipped_by_its_breaker_is_asked_if_the_others_cannot_decide(five: RedlockSet) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in five.nodes[:3]]
        store = stack.enter_context(closing(opened(proxies)))
        for number in range(6):
            proxies[number % 3].set_mode("refuse")
            took(store, f"o.{number}")
            store.release(NAME, f"o.{number}", ReleaseRequest())
            proxies[number % 3].set_mode("pass")


@pytest.mark.invariant("redlock-survives-a-minority")
def test_server_lost_between_vote_and_agreement_costs_no_lock_that_five_hold(five: RedlockSet) -> None:
    """Two answer the vote late, and so are not among the three that decide it. They hold the lock, and agree."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in five.nodes]
        store = stack.enter_context(closing(opened(proxies, timeout=10)))
        took(store, "o.1")
        store.release(NAME, "o.1", ReleaseRequest())
        eventually(lambda: not store._nodes.busy)
        proxies[0].set_mode("cut_reply", containing=AGREE.sha.encode())
        for proxy in proxies[3:]:
            proxy.set_delay(0.2, 0.2)
        answer = store.acquire(NAME, "o.2", 10 * TTL, claim_of())
        assert isinstance(answer, Acquired)
        found = []
        for node in five.nodes[1:]:
            with node.client() as client:
                found.append(client.hmget(KEYS.lock, "acq", "token"))
        assert found.count(["o.2", str(answer.token)]) >= 3


def cut_all(nodes: Sequence[Server]) -> None:
    """End every connection, as a server's idle limit does."""
    for node in nodes:
        with node.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)


@pytest.mark.invariant("redlock-survives-a-minority")
@pytest.mark.core
def test_first_lock_after_all_connections_were_cut_is_taken(five: RedlockSet, store: RedlockStore) -> None:
    took(store, "o.1")
    cut_all(five.nodes)
    assert store.renew([Renewal(NAME, "o.1", TTL)]) == [True]
    cut_all(five.nodes)
    assert store.release(NAME, "o.1", ReleaseRequest()).ours
    cut_all(five.nodes)
    took(store, "o.2")
    eventually(lambda: holders(five.nodes) == ["o.2"] * 5)
    # The first command may arrive later.
    store.release(NAME, "o.2", ReleaseRequest())
    eventually(lambda: all(kept(node, KEYS.tombstone("o.2")) for node in five.nodes))


def kept(node: Server, key: str) -> bool:
    with node.client() as client:
        return bool(client.exists(key))


@pytest.mark.invariant("redlock-survives-a-minority")
def test_first_lock_after_a_cut_is_taken_though_two_of_five_hang(five: RedlockSet, store: RedlockStore) -> None:
    took(store, "o.1")
    cut_all(five.nodes)
    for node in five.nodes[:2]:
        node.pause()
    assert store.renew([Renewal(NAME, "o.1", TTL)]) == [True]
    assert store.release(NAME, "o.1", ReleaseRequest()).ours
    cut_all(five.nodes[2:])
    took(store, "o.2")


def test_acquire_refused_after_a_cut_leaves_a_tombstone(five: RedlockSet, store: RedlockStore) -> None:
    took(store, "o.1")
    eventually(lambda: holders(five.nodes) == ["o.1"] * 5)
    cut_all(five.nodes)
    assert isinstance(store.acquire(NAME, "p.1", TTL, claim_of()), Held)
    eventually(lambda: sum(kept(node, KEYS.tombstone("p.1")) for node in five.nodes) >= 3)


class Failing(CredentialProvider):
    """Raises an error that no driver knows."""

    def get_credentials(self) -> tuple[str, str]:
        raise RuntimeError("no token")


@pytest.mark.invariant("failing-connection-is-unavailable")
@pytest.mark.core
def test_member_whose_credential_provider_fails_is_away_alone(five: RedlockSet) -> None:
    failing = [f"redis://127.0.0.1:{node.port}/0?credential_provider={__name__}.Failing" for node in five.nodes[2:4]]
    urls = five.lock_urls()[:2]
    with closing(
        open_store(locations_from_settings([*urls, failing[0]], {}), timeout=TIMEOUT, prefix="dlock")
    ) as store:
        took(store, "o.1")  # type: ignore[arg-type]
        assert store.renew([Renewal(NAME, "o.1", TTL)]) == [True]
        assert store.release(NAME, "o.1", ReleaseRequest()).ours
    with (
        closing(open_store(locations_from_settings([urls[0], *failing], {}), timeout=TIMEOUT, prefix="dlock")) as store,
        pytest.raises(StoreUnavailable, match=r"no majority of its 3 servers: .*RuntimeError: no token"),
    ):
        store.acquire(NAME, "o.2", TTL, claim_of())


# Votes


@pytest.mark.invariant("majority-decides")
def test_a_lost_vote_is_split_and_leaves_nothing_of_the_loser(five: RedlockSet, store: RedlockStore) -> None:
    """Two others hold two servers each; no majority names anybody, and no one is called the holder."""
    for place, acquisition in enumerate(["a.1", "a.1", "b.1", "b.1"]):
        hold(five.node(place), acquisition)
    assert store.acquire(NAME, "o.1", TTL, claim_of("id1", once=True)) == NoMajority()
    eventually(lambda: holders(five.nodes) == ["a.1", "a.1", "b.1", "b.1", None])
    assert store.inspect(NAME) is None
    assert store.use(NAME) is None


@pytest.mark.invariant("majority-decides")
def test_what_a_minority_holds_is_in_nobodys_way(five: RedlockSet, store: RedlockStore) -> None:
    hold(five.node(0), "dead.1")
    hold(five.node(1), "dead.2")
    took(store, "o.1")
    assert eventually(lambda: holders(five.nodes) == ["dead.1", "dead.2", "o.1", "o.1", "o.1"])


def test_who_holds_a_majority_is_met_as_its_holder(five: RedlockSet, store: RedlockStore) -> None:
    for node in five.nodes[1:4]:
        hold(node, "a.1")
    answer = store.acquire(NAME, "o.1", TTL, claim_of())
    assert isinstance(answer, Held)
    assert answer.holder.owner == "a"
    eventually(lambda: holders(five.nodes) == [None, "a.1", "a.1", "a.1", None])


def test_a_name_that_a_majority_knows_as_used_is_used_whoever_is_away(five: RedlockSet, store: RedlockStore) -> None:
    for node in five.nodes[:2]:
        node.kill()
    took(store, "o.1", claim_of("id1", once=True))
    store.release(NAME, "o.1", ending_of("id1", used_ms=TTL, once=True))
    for node in five.nodes[:2]:
        node.start()
    for node in five.nodes[3:]:
        node.kill()
    # One of the three that answer knows.
    assert isinstance(eventually(lambda: _answer(store, claim_of("id2", once=True))), Used)
    use = store.use(NAME)
    assert use is not None
    assert use.state == "used"


@pytest.mark.invariant("majority-decides")
def test_two_that_race_get_it_one_at_a_time_and_one_of_them_each_time(five: RedlockSet) -> None:
    rounds = 500
    urls, together = five.lock_urls(), threading.Barrier(2, timeout=60)
    wins: list[list[object]] = [[], []]

    def race(place: int) -> None:
        party = Party(urls, timeout=TIMEOUT)
        for number in range(rounds):
            together.wait()
            name = shared_name(f"race {number % 7}")
            answer = party.locker.acquire(name, party.scope, 30.0, AcquireRequest(party.scope.by))
            wins[place].append(answer)
            together.wait()
            if isinstance(answer, Lease):
                assert party.release(answer)
        party.store.close()

    racers = [threading.Thread(target=race, args=(place,)) for place in (0, 1)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(120)
    won = [[isinstance(answer, Lease) for answer in answers] for answers in wins]
    assert [one + other for one, other in zip(*won, strict=True)] == [1] * rounds


def test_a_crowd_is_served_one_after_the_other(five: RedlockSet) -> None:
    """Eight owners wait for one lock, each for its turn; none is inside with another, and tokens grow."""
    urls, name = five.lock_urls(), shared_name("crowd")
    inside: list[int] = []
    tokens: list[int] = []
    overlaps: list[int] = []

    def work(party: Party) -> None:
        for _ in range(5):
            scope = party.new_scope()
            lease = party.locker.acquire_within(name, scope, 30.0, AcquireRequest(scope.by), 60.0)
            assert isinstance(lease, Lease), lease
            inside.append(1)
            overlaps.append(len(inside))
            tokens.append(lease.token or 0)
            inside.pop()
            party.locker.release(lease, scope)

    parties = [Party(urls, timeout=TIMEOUT) for _ in range(8)]
    crowd = [threading.Thread(target=work, args=(party,)) for party in parties]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join(100)
    assert len(tokens) == 40
    assert set(overlaps) == {1}
    assert tokens == sorted(set(tokens))


# One server under two names


@contextmanager
def led_astray(five: RedlockSet) -> Iterator[tuple[RedlockStore, list[Server]]]:
    """A store that has held locks on three servers; now the third name leads to the first one."""
    nodes = list(five.nodes[:3])
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in nodes]
        store = stack.enter_context(closing(opened(proxies)))
        for number in range(3):
            took(store, f"w.{number}")
            store.release(NAME, f"w.{number}", ReleaseRequest())
        eventually(lambda: holders(nodes) == [None] * 3)
        proxies[2].lead_to(nodes[0].port or 0)
        yield store, nodes


def not_taken(store: RedlockStore) -> str:
    """Ask for a lock that may not be granted; why it was not."""
    try:
        answer = store.acquire(NAME, f"o.{uuid.uuid4()}", TTL, claim_of())
    except StoreUnavailable as error:
        return str(error)
    assert answer == NoMajority()
    return ""


@pytest.mark.invariant("one-server-has-one-vote", "redlock-counts-servers")
@pytest.mark.core
def test_name_that_leads_to_another_member_later_has_no_vote(five: RedlockSet) -> None:
    with led_astray(five) as (store, nodes):
        for node in nodes[1:]:
            hold(node, "p.1")  # of another process, whose names lead where they should
        eventually(lambda: "are the same server" in not_taken(store))
        eventually(lambda: holders(nodes) == [None, "p.1", "p.1"])


@pytest.mark.invariant("one-server-has-one-vote")
@pytest.mark.core
def test_name_that_leads_to_another_member_later_has_no_vote_without_info(five: RedlockSet) -> None:
    """Without the right to ask a server who it is, two answers of one token and one time count as one vote."""
    for node in five.nodes:
        with node.client() as client:
            client.execute_command("ACL", "SETUSER", LOCK_USER, "-info")  # type: ignore[no-untyped-call]
    try:
        with led_astray(five) as (store, nodes):
            for node in nodes[1:]:
                hold(node, "p.1")
            assert store.acquire(NAME, "o.1", TTL, claim_of()) == NoMajority()
            eventually(lambda: holders(nodes) == [None, "p.1", "p.1"])
    finally:
        for node in five.nodes:
            with node.client() as client:
                client.execute_command("ACL", "SETUSER", LOCK_USER, "+info")  # type: ignore[no-untyped-call]


def test_first_lock_without_info_does_not_wait_for_a_server_that_hangs(five: RedlockSet) -> None:
    nodes = five.nodes[:3]
    for node in nodes:
        with node.client() as client:
            client.execute_command("ACL", "SETUSER", LOCK_USER, "-info")  # type: ignore[no-untyped-call]
    nodes[2].pause()
    try:
        with closing(opened(nodes, timeout=30)) as store:
            began = time.monotonic()
            assert isinstance(store.acquire(NAME, "o.1", 60 * TTL, claim_of()), Acquired)
            assert time.monotonic() - began < 5
    finally:
        nodes[2].resume()
        for node in nodes:
            with node.client() as client:
                client.execute_command("ACL", "SETUSER", LOCK_USER, "+info")  # type: ignore[no-untyped-call]


def test_first_lock_waits_a_tenth_of_its_ttl_for_servers_to_say_who_they_are(
    five: RedlockSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = threading.Event()
    with closing(opened(five.nodes, timeout=30)) as store:
        for node in store._nodes.all[:3]:
            monkeypatch.setattr(node.store, "facts", lambda: silent.wait(30))
        began = time.monotonic()
        assert isinstance(store.acquire(NAME, "o.1", 5_000, claim_of()), Acquired)
        assert time.monotonic() - began < 2.5
        silent.set()


@pytest.mark.invariant("one-server-has-one-vote", "redlock-counts-servers")
def test_renewals_and_ends_of_one_server_under_two_names_count_once(five: RedlockSet) -> None:
    with led_astray(five) as (store, nodes):
        hold(nodes[0], "o.1")
        nodes[1].kill()
        with pytest.raises(StoreUnavailable, match="are the same server"):
            store.renew([Renewal(NAME, "o.1", TTL)])
        with pytest.raises(StoreUnavailable, match="are the same server"):
            store.release(NAME, "o.1", ending_of("id1", used_ms=TTL, once=True))
        with pytest.raises(StoreUnavailable, match="are the same server"):
            store.mark_done(NAME, Identity("id1").digest, "o", 0)


@pytest.mark.invariant("redlock-counts-servers")
def test_names_that_change_places_are_members_again(five: RedlockSet) -> None:
    """Each leads to the server of the next one, as after servers were moved."""
    nodes = list(five.nodes[:3])
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in nodes]
        store = stack.enter_context(closing(opened(proxies)))
        took(store, "o.1")
        eventually(lambda: not store._nodes.busy)
        for proxy, node in zip(proxies, [*nodes[1:], nodes[0]], strict=True):
            proxy.lead_to(node.port or 0)
        eventually(lambda: _renewed_by_all(store, nodes))
        eventually(lambda: _released(store, "o.1") and holders(nodes) == [None] * 3)
        eventually(lambda: _acquired(store, "p"))


def _renewed_by_all(store: RedlockStore, nodes: Sequence[Server]) -> bool:
    try:
        store.renew([Renewal(NAME, "o.1", 2 * TTL)])
    except StoreUnavailable:
        return False
    lives = []
    for node in nodes:
        with node.client() as client:
            lives.append(client.pttl(KEYS.lock))
    return min(lives) > TTL


# Leases


def test_lease_lives_with_a_majority_and_is_not_restored_on_a_server_that_lost_it(
    five: RedlockSet, store: RedlockStore
) -> None:
    took(store, "o.1")
    eventually(lambda: holders(five.nodes) == ["o.1"] * 5)
    renewal = Renewal(NAME, "o.1", 60_000)
    for node in five.nodes[:2]:
        node.flush()
    assert store.renew([renewal]) == [True]
    assert holders(five.nodes) == [None, None, "o.1", "o.1", "o.1"]
    five.node(2).flush()
    assert store.renew([renewal]) == [False]


@pytest.mark.invariant("majority-decides")
def test_where_no_majority_says_either_a_lease_is_neither_renewed_nor_lost(
    five: RedlockSet, store: RedlockStore
) -> None:
    took(store, "o.1")
    took_too = store.acquire(shared_name("y"), "o.2", TTL, claim_of())
    assert isinstance(took_too, Acquired)
    eventually(lambda: holders(five.nodes) == ["o.1"] * 5)
    eventually(lambda: holders(five.nodes, keys_of("y")) == ["o.2"] * 5)
    with five.node(0).client() as client:
        client.delete(KEYS.lock)
    for node in five.nodes[3:]:
        node.kill()
    assert store.renew([Renewal(NAME, "o.1", TTL), Renewal(name_in(keys_of("y")), "o.2", TTL)]) == [None, True]
    with pytest.raises(StoreUnavailable, match="no majority"):
        store.renew([Renewal(NAME, "o.1", TTL)])


@pytest.mark.invariant("redlock-needs-a-majority")
def test_a_keeper_tells_of_a_lease_that_no_majority_renews(five: RedlockSet) -> None:
    party = Party(five.lock_urls(), timeout=0.3)
    lease = party.acquire(shared_name("kept"), ttl=6)
    for node in five.nodes[:3]:
        node.pause()
    eventually(lambda: party.lost, within=10)
    assert lease.lost
    with pytest.raises(LockLost):
        lease.ensure()


def test_a_keeper_keeps_a_lease_while_two_of_five_hang(five: RedlockSet) -> None:
    party = Party(five.lock_urls(), timeout=0.5)
    lease = party.acquire(shared_name("kept"), ttl=3)
    for node in five.nodes[:2]:
        node.pause()
    end = time.monotonic() + 7.0
    eventually(lambda: lease.lost or time.monotonic() > end, within=9)
    assert not lease.lost
    lease.ensure()
    assert party.release(lease)


def test_a_release_that_no_majority_confirms_is_an_error_and_may_be_repeated(
    five: RedlockSet, store: RedlockStore
) -> None:
    took(store, "o.1")
    for node in five.nodes[:3]:
        node.kill()
    with pytest.raises(ReplyLost):
        store.release(NAME, "o.1", ReleaseRequest())
    for node in five.nodes[:3]:
        node.start()
    # A server that was silent is left in peace for a moment, so the last one may hear of it by a later call.
    eventually(lambda: _released(store, "o.1") and holders(five.nodes) == [None] * 5)


def _released(store: RedlockStore, acquisition: str) -> bool:
    try:
        store.release(NAME, acquisition, ReleaseRequest())
    except StoreUnavailable:
        return False
    return True


@pytest.mark.invariant("majority-decides")
def test_a_server_that_missed_a_release_hears_of_it_when_it_answers_again(five: RedlockSet) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in five.nodes]
        store = stack.enter_context(closing(opened(proxies)))
        took(store, "o.1", claim_of("id1", once=True))
        eventually(lambda: holders(five.nodes) == ["o.1"] * 5)
        proxies[0].set_mode("refuse")
        assert store.release(NAME, "o.1", ending_of("id1", used_ms=TTL, once=True, window_ms=TTL)).ours
        eventually(lambda: holders(five.nodes) == ["o.1", None, None, None, None])
        proxies[0].set_mode("pass")
        eventually(lambda: store.inspect(shared_name("y")) or holders(five.nodes) == [None] * 5, every=0.1)
        # It was told of the end, not of the use, which would begin anew there.
        with of_one(five.node(0)) as alone:
            assert alone.use(NAME) is None


#: Lines between two that are struck: each round takes its time.
STEP = 131


@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")
def test_a_soft_limit_at_any_line_leaves_no_lock_on_any_server(five: RedlockSet, make_app: Any) -> None:
    app = make_app(five.lock_urls(), dlock_restart_delay=0, result_backend="cache+memory://")
    runtime = Runtime.of(app)
    assert runtime.keeper._loop.running.take()  # the test is its scheduler
    ended = set()

    @singleton_task(app=app, once_per=5, name="interrupted")
    def work(number: int) -> None:
        ended.add(number)

    app.finalize()
    work.__trace__ = build_tracer(work.name, work, app=app)
    for struck in itertools.count(0, STEP):
        strike = Strike(at=struck)
        run(work, struck, strike)
        runtime.keeper.tick()
        assert (strike.where, runtime.slots.taken()) == (strike.where, [])  # type: ignore[attr-defined]
        keys = LockKeys.of("dlock", work.lock_spec.name_of((struck,), {}))
        eventually(lambda keys=keys: holders(five.nodes, keys) == [None] * 5, message=strike.where)  # type: ignore[misc]
        assert_no_doubt(work.used(struck), strike.where, ended=struck in ended)
        if not strike.where:
            break
    assert struck > 300


# Restarts


@pytest.mark.invariant("redlock-restart-waits")
def test_a_server_that_restarted_empty_takes_no_part_until_the_longest_ttl_is_over(five: RedlockSet) -> None:
    """One of three was away when the lock was taken, and another loses it: those two together must not give it away."""
    three = five.nodes[:3]
    with closing(opened(three, probation=Quarantine(3.0, "dlock_restart_delay"))) as store:
        eventually(lambda: _acquired(store, "w"), within=15)
        hold(three[0], "o.1")
        hold(three[1], "o.1")
        three[1].flush()  # as if it had restarted without its data
        assert store.acquire(NAME, "p.1", TTL, claim_of()) == NoMajority()
        assert holders(three) == ["o.1", None, None]
        store.release(NAME, "o.1", ReleaseRequest())
        assert _acquired(store, "p")  # of the two that kept what they knew
        three[0].pause()
        # One that was slow a moment ago is not asked, and says that instead.
        eventually(lambda: re.search("grants nothing new .*dlock_restart_delay", refusal(store, "p.2")))
        eventually(lambda: _acquired(store, "p"), within=10)


def refusal(store: RedlockStore, acquisition: str) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        store.acquire(NAME, acquisition, TTL, claim_of())
    return str(caught.value)


def _acquired(store: RedlockStore, owner: str) -> bool:
    acquisition = f"{owner}.{uuid.uuid4()}"
    try:
        return isinstance(store.acquire(NAME, acquisition, TTL, claim_of()), Acquired)
    except StoreUnavailable:
        return False
    finally:
        _released(store, acquisition)


# Idempotency keys


@pytest.mark.invariant("tokens-are-agreed")
def test_a_seed_is_the_same_for_every_run_until_one_succeeds_whoever_is_away(
    five: RedlockSet, store: RedlockStore
) -> None:
    seeds = []
    for number, away in enumerate([(0, 1), (2, 3), (4, 0)]):
        for place in away:
            five.node(place).kill()
        eventually(lambda number=number: _begun(store, number, seeds))  # type: ignore[misc]
        for place in away:
            five.node(place).start()
        for node in five.nodes:
            with node.client() as client:
                client.delete(KEYS.lock)  # it died, and its lease is over
    assert len(seeds) == 3
    assert len(set(seeds)) == 1


def _begun(store: RedlockStore, number: int, seeds: list[str]) -> bool:
    try:
        answer = store.acquire(NAME, f"o.{number}{uuid.uuid4()}", TTL, claim_of("id1", once=True))
    except StoreUnavailable:
        return False
    if isinstance(answer, Acquired):
        assert answer.after_crash == (number > 0)
        seeds.append(answer.seed)
    return isinstance(answer, Acquired)


def test_a_vote_that_was_lost_is_no_death(five: RedlockSet, store: RedlockStore) -> None:
    for place, acquisition in enumerate(["a.1", "a.1", "b.1", "b.1"]):
        hold(five.node(place), acquisition)
    assert store.acquire(NAME, "o.1", TTL, claim_of("id1", once=True)) == NoMajority()
    for node in five.nodes[:4]:
        with node.client() as client:
            client.delete(KEYS.lock)
    answer = took(store, "o.2", claim_of("id1", once=True, hold=True))
    assert not answer.after_crash


def test_a_body_that_died_holds_the_next_back_whoever_is_away(five: RedlockSet, store: RedlockStore) -> None:
    five.node(0).kill()
    five.node(1).kill()
    took(store, "o.1", claim_of("id1", once=True))
    five.node(0).start()
    five.node(1).start()
    for node in five.nodes:
        with node.client() as client:
            client.delete(KEYS.lock)
    five.node(3).kill()
    five.node(4).kill()
    answer = eventually(lambda: _answer(store, claim_of("id2", once=True, hold=True)))
    assert isinstance(answer, Unknown)
    assert store.resolve(NAME, sent=True, window_ms=TTL)
    assert isinstance(_answer(store, claim_of("id2", once=True)), Used)


def _answer(store: RedlockStore, claim: AcquireRequest) -> object:
    try:
        return store.acquire(NAME, f"q.{uuid.uuid4()}", TTL, claim)
    except StoreUnavailable:
        return None


# Waiters


def test_a_waiter_is_woken_although_the_server_that_it_listens_to_goes_away(
    five: RedlockSet, store: RedlockStore
) -> None:
    took(store, "o.1")
    with store.waker(NAME) as waker:
        listened = [node for node in five.nodes if _subscribers(node)]
        assert len(listened) == 1
        listened[0].kill()
        assert waker.wait(5)  # to look for itself
        assert isinstance(store.acquire(NAME, "w.1", TTL, claim_of(waits=True)), Held)
        assert sum(_subscribers(node) for node in five.nodes if node.running) == 1
        store.release(NAME, "o.1", ReleaseRequest())
        assert waker.wait(5)
        took(store, "w.2")


def _subscribers(node: Server) -> int:
    with node.client() as client:
        ((_, count),) = client.pubsub_numsub(KEYS.channel)
    return int(count)


# Fencing tokens


@pytest.mark.invariant("tokens-are-agreed", "redlock-tokens-grow")
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_grow_strictly_whoever_dies_returns_loses_replies_or_is_ahead(five: RedlockSet, seed: int) -> None:
    """Of three servers one at a time is away; another owner takes the lock whenever the last one's lease is over."""
    nodes, chance = five.nodes[:3], random.Random(seed)
    tokens: list[int] = []
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in nodes]
        store = stack.enter_context(closing(opened(proxies, timeout=0.3)))
        for _ in range(25):
            tokens.append(_taken(store))
            _break(
                nodes, proxies, chance.choice(["none", "expire", "kill", "pause", "cut", "ahead"]), chance.randrange(3)
            )
    assert tokens == sorted(set(tokens))


def _taken(store: RedlockStore) -> int:
    """The token of an owner that gets the lock, however often it has to ask, and gives it back."""

    def token() -> int:
        acquisition = uuid.uuid4().hex
        try:
            answer = store.acquire(NAME, acquisition, 3_000, claim_of())
        except StoreUnavailable:
            answer = None
        _released(store, acquisition)
        return answer.token if isinstance(answer, Acquired) else 0

    return eventually(token, within=20)


def _break(nodes: Sequence[Server], proxies: Sequence[Proxy], step: str, place: int) -> None:
    if step in ("kill", "pause"):
        for node in nodes:  # no more than one is away at a time, each with its data
            if not node.running:
                node.start()
            node.resume()
        getattr(nodes[place], step)()
    elif step == "cut":
        proxies[place].set_mode("cut_reply", times=1, containing=b"EVALSHA")
    elif step != "none" and nodes[place].answering:
        with nodes[place].client() as client:
            if step == "expire":
                client.delete(KEYS.lock)
            else:
                client.set(KEYS.last, int(client.get(KEYS.last) or 0) + 5_000_000)


@pytest.mark.invariant("tokens-are-agreed")
def test_highest_token_of_the_majority_is_confirmed_before_the_lock_is_granted(
    five: RedlockSet, store: RedlockStore
) -> None:
    with five.node(2).client() as client:
        client.set(KEYS.last, 3_000_000_000_000_000)
    five.node(0).kill()
    five.node(1).kill()
    assert took(store, "o.1").token == 3_000_000_000_000_001
    found = []
    for node in five.nodes[2:]:
        with node.client() as client:
            found.append((client.get(KEYS.last), client.hget(KEYS.lock, "token")))
    assert found == [("3000000000000001", "3000000000000001")] * 3


def test_servers_whose_clocks_are_behind_their_last_token_are_a_majority(five: RedlockSet, store: RedlockStore) -> None:
    """All of them give the next token, and so the same one."""
    for node in five.nodes:
        with node.client() as client:
            client.set(KEYS.last, 3_000_000_000_000_000)
    assert took(store, "o.1").token == 3_000_000_000_000_001


# What it will not do, and what it costs nobody


def test_queues_and_claims_are_refused(store: RedlockStore) -> None:
    with pytest.raises(InvalidLockOptions, match="on_conflict='queue' is not allowed"):
        store.acquire(NAME, "o.1", TTL, claim_of("id1", place=QueueRequest()))


def test_an_option_that_it_refuses_is_refused_where_the_task_is_defined(five: RedlockSet, make_app: Any) -> None:
    for options, words in (
        ({"on_conflict": "queue"}, "on_conflict='queue'"),
        ({"unique": "queued"}, "unique='queued'"),
    ):

        def body() -> None: ...

        with pytest.raises(InvalidLockOptions, match=rf"task 'x': invalid {words}: several servers in dlock_url"):
            singleton_task(app=make_app(five.lock_urls()), name="x", **options)(body).run()

    @singleton_task(app=make_app(five.lock_urls()), name="y")
    def plain() -> None: ...

    with pytest.raises(InvalidLockOptions, match="task 'y': invalid on_conflict='queue': several servers"):
        plain.apply_async(dlock={"on_conflict": "queue"})


def test_a_servers_silence_is_told_of_at_the_start(five: RedlockSet, store: RedlockStore) -> None:
    assert store.facts().silent == ()
    five.node(3).kill()
    (silent,) = store.facts().silent
    assert f"127.0.0.1:{five.node(3).port}" in silent


def test_a_fork_has_threads_and_connections_of_its_own(store: RedlockStore) -> None:
    took(store, "o.1")
    pid = os.fork()
    if not pid:
        ok = False
        try:
            held = isinstance(store.acquire(NAME, "p.1", TTL, claim_of()), Held)
            ok = held and store.release(NAME, "o.1", ReleaseRequest()).ours
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    took(store, "p.2")


def test_a_hung_server_delays_no_exit(five: RedlockSet) -> None:
    for node in five.nodes[:2]:
        node.pause()
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from celery_dlock.config.locations import locations_from_settings
from celery_dlock.store.factory import open_store
from tests.contract.helpers import NAME, claim_of
store = open_store(locations_from_settings({five.lock_urls()!r}, {{}}), timeout=30, prefix="dlock")
print(type(store.acquire(NAME, "o.1", 30_000, claim_of())).__name__, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "Acquired\n"
    assert process.wait(5) == 0
    process.stdout.close()


def test_an_idle_store_has_no_threads(five: RedlockSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_dlock.store.redlock.fanout.IDLE", 0.1)
    with closing(opened(five.nodes)) as store:
        before = psutil.Process().num_threads()
        took(store, "o.1")
        assert psutil.Process().num_threads() > before
        eventually(lambda: psutil.Process().num_threads() <= before)
        assert store.release(NAME, "o.1", ReleaseRequest()).ours


def test_majority_whose_threads_can_be_started_gives_the_lock(
    store: RedlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, 3)
    took(store, "o.1")


def test_no_majority_of_threads_is_a_store_that_does_not_answer_and_leaves_no_lock(
    five: RedlockSet, store: RedlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, 2)
    with pytest.raises(StoreUnavailable, match="it was not asked: can't start new thread"):
        took(store, "o.1")
    monkeypatch.undo()
    store.release(NAME, "o.1", ReleaseRequest(outcome_unknown=True))
    eventually(lambda: holders(five.nodes) == [None] * 5 and not store._nodes.busy)
