"""Servers that hang, die, restart or lose connections: what a majority endures and leaves behind."""

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import psutil
import pytest
from redis import CredentialProvider

from celery_dlock.config.locations import locations_from_settings
from celery_dlock.errors import ReplyLost, StoreUnavailable
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking.waiting import POLL
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.factory import open_store
from celery_dlock.store.model import Acquired, Contended, Duplicate, Held, Identity, Renewal, Used
from celery_dlock.store.redis.scripts import SCRIPTS
from celery_dlock.store.redlock.store import RedlockStore
from celery_dlock.store.server_model import Quarantine
from tests.contract.helpers import NAME, TTL, ending_of, keys_of, request_of
from tests.contract.redlock.helpers import (
    KEYS,
    TIMEOUT,
    acquired,
    can_acquire,
    hold,
    holders,
    of_one,
    open_store_at,
    try_release,
)
from tests.support.polling import eventually
from tests.support.processes import ROOT
from tests.support.proxy import Proxy
from tests.support.scripts import shas
from tests.support.servers import LOCK_PASSWORD, Server
from tests.support.stores import name_in
from tests.support.topologies import RedlockSet


def test_a_late_mark_is_a_majority_s(five: RedlockSet, store: RedlockStore) -> None:
    for node in five.nodes[:2]:
        node.kill()
    store.mark_done(NAME, Identity("id1").digest, "o", 60_000_000)
    assert store.acquire(NAME, "o.1", TTL, request_of("id1", redelivered=True)) == Duplicate()
    five.nodes[2].kill()
    with pytest.raises(StoreUnavailable):
        store.mark_done(NAME, Identity("id2").digest, "o", 0)


@pytest.mark.invariant("redlock-survives-a-minority")
@pytest.mark.parametrize("way", ["kill", "pause"])
def test_two_of_five_servers_away_change_nothing(five: RedlockSet, store: RedlockStore, way: str) -> None:
    for node in five.nodes[:2]:
        getattr(node, way)()
    acquired(store, "o.1", request_of("id1", once=True))
    assert isinstance(store.acquire(NAME, "p.1", TTL, request_of("id2")), Held)
    assert store.renew([Renewal(NAME, "o.1", TTL)]) == [True]
    holder = store.inspect(NAME)
    assert holder is not None
    assert holder.task_id == "id1"
    assert store.release(NAME, "o.1", ending_of("id1", used_ms=TTL, once=True)).ours
    used = store.last_run(NAME)
    assert used is not None
    assert used.state == "used"
    assert isinstance(store.acquire(NAME, "p.2", TTL, request_of("id2", once=True)), Used)
    assert store.forget_run(NAME)
    acquired(store, "p.3", request_of("id2", once=True))


@pytest.mark.invariant("redlock-needs-a-majority")
def test_three_of_five_servers_away_grant_no_lock_and_the_error_names_them(
    five: RedlockSet, store: RedlockStore
) -> None:
    for node in five.nodes[:3]:
        node.kill()
    with pytest.raises(StoreUnavailable, match="no majority of its 5 servers") as caught:
        store.acquire(NAME, "o.1", TTL, request_of())
    assert all(f"127.0.0.1:{node.port}" in str(caught.value) for node in five.nodes[:3])
    assert LOCK_PASSWORD not in str(caught.value)
    assert holders(five.nodes[3:]) == [None, None]
    for ask in (lambda: store.inspect(NAME), lambda: store.last_run(NAME), lambda: store.forget_run(NAME), store.info):
        with pytest.raises(StoreUnavailable, match="no majority"):
            ask()
    for node in five.nodes[:3]:
        node.start()
    eventually(lambda: can_acquire(store, "o"), within=15)


def test_three_hung_servers_cost_a_tenth_of_the_ttl_and_late_leases_are_released(
    five: RedlockSet, store: RedlockStore
) -> None:
    acquired(store, "w.1")
    store.release(NAME, "w.1", ReleaseRequest())
    for node in five.nodes[:3]:
        node.pause()
    began = time.monotonic()
    with pytest.raises(ReplyLost):
        store.acquire(NAME, "o.1", 5_000, request_of())
    assert time.monotonic() - began < 1.5  # of the timeout's 2 s
    for node in five.nodes[:3]:
        node.resume()
    eventually(lambda: holders(five.nodes) == [None] * 5)


def test_hung_server_is_skipped_soon_and_its_late_leases_are_released(five: RedlockSet, store: RedlockStore) -> None:
    acquired(store, "w.1")
    store.release(NAME, "w.1", ReleaseRequest())
    five.node(4).pause()
    for number in range(20):
        acquired(store, f"o.{number}")
        store.release(NAME, f"o.{number}", ReleaseRequest())
    threads = psutil.Process().num_threads()
    began = time.monotonic()
    for number in range(20):
        acquired(store, f"p.{number}")
        store.release(NAME, f"p.{number}", ReleaseRequest())
    assert time.monotonic() - began < 20 * 0.1
    assert psutil.Process().num_threads() <= threads + 4
    five.node(4).resume()
    eventually(lambda: holders(five.nodes) == [None] * 5)

    def takes_part() -> bool:
        acquisition = f"q.{uuid.uuid4()}"
        acquired(store, acquisition)
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
    with closing(open_store_at(five.nodes, timeout=0.5)) as refused:
        took_elsewhere = keys_of("elsewhere")
        refused.acquire(name_in(took_elsewhere), "o.0", TTL, request_of())  # connected
        refused.release(name_in(took_elsewhere), "o.0", ReleaseRequest())
        hung.pause()
        assert isinstance(refused.acquire(NAME, "o.1", TTL, request_of()), Held)
        eventually(lambda: not refused._servers.members[4]._pending, within=10)  # given up, and in the server's queue
        hung.resume()
        eventually(lambda: refused.inspect(NAME) is not None and holders([hung]) == [None], within=15)


def test_cut_replies_cost_no_caller_the_lock_and_leave_nothing(five: RedlockSet) -> None:
    """Two of five carry out and do not answer, in turn, at each step."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in five.nodes]
        store = stack.enter_context(closing(open_store_at(proxies)))
        for number in range(10):
            for proxy in (proxies[number % 5], proxies[(number + 1) % 5]):
                proxy.set_mode("cut_reply", times=2, containing=b"EVALSHA")
            acquired(store, f"o.{number}")
            assert store.release(NAME, f"o.{number}", ReleaseRequest()).ours
            eventually(lambda: holders(five.nodes) == [None] * 5)
            for proxy in proxies:
                proxy.set_mode("pass")


def test_server_skipped_by_its_breaker_is_asked_if_the_others_cannot_decide(five: RedlockSet) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in five.nodes[:3]]
        store = stack.enter_context(closing(open_store_at(proxies)))
        for number in range(6):
            proxies[number % 3].set_mode("refuse")
            acquired(store, f"o.{number}")
            store.release(NAME, f"o.{number}", ReleaseRequest())
            proxies[number % 3].set_mode("pass")


@pytest.mark.invariant("redlock-survives-a-minority")
def test_server_lost_between_vote_and_agreement_costs_no_lock_that_five_hold(five: RedlockSet) -> None:
    """Two answer the vote late, and so are not among the three that decide it. They hold the lock, and agree."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in five.nodes]
        store = stack.enter_context(closing(open_store_at(proxies, timeout=10)))
        acquired(store, "o.1")
        store.release(NAME, "o.1", ReleaseRequest())
        eventually(lambda: not store._servers.busy)
        proxies[0].set_mode("cut_reply", containing=shas(SCRIPTS["adopt_token"]))
        for proxy in proxies[3:]:
            proxy.set_delay(0.2, 0.2)
        answer = store.acquire(NAME, "o.2", 10 * TTL, request_of())
        assert isinstance(answer, Acquired)
        found = []
        for node in five.nodes[1:]:
            with node.client() as client:
                found.append(client.hmget(KEYS.lock, "acq", "token"))
        assert found.count(["o.2", str(answer.token)]) >= 3


def cut_all(nodes: Sequence[Server], store: RedlockStore) -> None:
    """End every connection of the store, as a server's idle limit does, once no call is under way."""
    # A call that opens its connection after the cut would leave the next call one that works.
    eventually(lambda: not store._servers.busy, within=10)
    for node in nodes:
        with node.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)


@pytest.mark.invariant("redlock-survives-a-minority")
@pytest.mark.core
def test_first_lock_after_all_connections_were_cut_is_taken(five: RedlockSet, store: RedlockStore) -> None:
    acquired(store, "o.1")
    cut_all(five.nodes, store)
    assert store.renew([Renewal(NAME, "o.1", TTL)]) == [True]
    cut_all(five.nodes, store)
    assert store.release(NAME, "o.1", ReleaseRequest()).ours
    cut_all(five.nodes, store)
    acquired(store, "o.2")
    eventually(lambda: holders(five.nodes) == ["o.2"] * 5)
    # The first command may arrive later.
    store.release(NAME, "o.2", ReleaseRequest())
    eventually(lambda: all(kept(node, KEYS.tombstone("o.2")) for node in five.nodes))


def kept(node: Server, key: str) -> bool:
    with node.client() as client:
        return bool(client.exists(key))


@pytest.mark.invariant("redlock-survives-a-minority")
def test_first_lock_after_a_cut_is_taken_though_two_of_five_hang(five: RedlockSet, store: RedlockStore) -> None:
    acquired(store, "o.1")
    cut_all(five.nodes, store)
    for node in five.nodes[:2]:
        node.pause()
    assert store.renew([Renewal(NAME, "o.1", TTL)]) == [True]
    assert store.release(NAME, "o.1", ReleaseRequest()).ours
    cut_all(five.nodes[2:], store)
    acquired(store, "o.2")


def test_acquire_refused_after_a_cut_leaves_a_tombstone(five: RedlockSet, store: RedlockStore) -> None:
    acquired(store, "o.1")
    eventually(lambda: holders(five.nodes) == ["o.1"] * 5)
    cut_all(five.nodes, store)
    assert isinstance(store.acquire(NAME, "p.1", TTL, request_of()), Held)
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
        acquired(store, "o.1")  # type: ignore[arg-type]
        assert store.renew([Renewal(NAME, "o.1", TTL)]) == [True]
        assert store.release(NAME, "o.1", ReleaseRequest()).ours
    with (
        closing(open_store(locations_from_settings([urls[0], *failing], {}), timeout=TIMEOUT, prefix="dlock")) as store,
        pytest.raises(StoreUnavailable, match=r"no majority of its 3 servers: .*RuntimeError: no token"),
    ):
        store.acquire(NAME, "o.2", TTL, request_of())


@pytest.mark.invariant("majority-decides")
def test_server_that_missed_a_release_gets_it_when_it_answers_again(five: RedlockSet) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in five.nodes]
        store = stack.enter_context(closing(open_store_at(proxies)))
        acquired(store, "o.1", request_of("id1", once=True))
        eventually(lambda: holders(five.nodes) == ["o.1"] * 5)
        proxies[0].set_mode("refuse")
        assert store.release(NAME, "o.1", ending_of("id1", used_ms=TTL, once=True, window_ms=TTL)).ours
        eventually(lambda: holders(five.nodes) == ["o.1", None, None, None, None])
        proxies[0].set_mode("pass")
        eventually(lambda: store.inspect(shared_name("y")) or holders(five.nodes) == [None] * 5, every=0.1)
        # It received the end, not the success: a run mark would begin anew there.
        with of_one(five.node(0)) as alone:
            assert alone.last_run(NAME) is None


@pytest.mark.invariant("redlock-restart-waits")
def test_a_server_that_restarted_empty_takes_no_part_until_the_longest_ttl_is_over(five: RedlockSet) -> None:
    """One of three was away when the lock was taken, and another loses it: those two together must not give it away."""
    three = five.nodes[:3]
    with closing(open_store_at(three, quarantine=Quarantine(3.0))) as store:
        eventually(lambda: taken_on_all(store, three), within=15)
        hold(three[0], "o.1")
        hold(three[1], "o.1")
        three[1].flush()  # as if it had restarted without its data
        assert isinstance(store.acquire(NAME, "p.1", TTL, request_of()), Contended)
        assert holders(three) == ["o.1", None, None]
        store.release(NAME, "o.1", ReleaseRequest())
        assert can_acquire(store, "p")  # of the two that kept what they knew
        three[0].pause()
        # One that was slow a moment ago is not asked, and says that instead.
        eventually(lambda: re.search("grants nothing new .*dlock_quarantine", refusal(store, "p.2")))
        eventually(lambda: can_acquire(store, "p"), within=10)


def taken_on_all(store: RedlockStore, nodes: Sequence[Server]) -> bool:
    """Return whether all servers grant a lock: the quarantines after their starts end one after the other."""
    acquisition = f"w.{uuid.uuid4()}"
    try:
        store.acquire(NAME, acquisition, TTL, request_of())
        return holders(nodes) == [acquisition] * len(nodes)
    except StoreUnavailable:
        return False
    finally:
        try_release(store, acquisition)


def refusal(store: RedlockStore, acquisition: str) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        store.acquire(NAME, acquisition, TTL, request_of())
    return str(caught.value)


def listen(store: RedlockStore) -> None:
    """Listen until a release wakes this caller."""
    listener = store.release_listener(NAME)
    eventually(lambda: listener.wait(POLL), every=0)


def test_a_waiter_is_woken_although_the_server_that_it_listens_to_goes_away(
    five: RedlockSet, store: RedlockStore
) -> None:
    acquired(store, "o.1")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(listen, store)
        listened = eventually(lambda: [node for node in five.nodes if _blocked(node)])
        assert len(listened) == 1
        listened[0].kill()
        waiting.result()
        assert isinstance(store.acquire(NAME, "w.1", TTL, request_of(notify=True)), Held)
        waiting = threads.submit(listen, store)
        eventually(lambda: sum(_blocked(node) for node in five.nodes if node.running) == 1)
        store.release(NAME, "o.1", ReleaseRequest())
        waiting.result()
    acquired(store, "w.2")


@pytest.mark.invariant("one-waiter-per-release")
def test_waiters_wait_on_one_server_and_a_release_wakes_one_of_them(five: RedlockSet, store: RedlockStore) -> None:
    """Else each release would wake one waiter per server, and these would split the votes."""
    acquired(store, "o.1")
    with ThreadPoolExecutor() as threads:
        waiting = []
        for number in range(3):
            assert isinstance(store.acquire(NAME, f"w.{number}", TTL, request_of(notify=True)), Held)
            waiting.append(threads.submit(listen, store))
            eventually(lambda number=number: sum(_blocked(node) for node in five.nodes) > number)  # type: ignore[misc]
        eventually(lambda: sorted(_blocked(node) for node in five.nodes) == [0, 0, 0, 0, 3])
        eventually(lambda: not store._servers.busy)
        assert store.release(NAME, "o.1", ReleaseRequest()).woke
        for number in range(3):
            eventually(lambda number=number: sum(one.done() for one in waiting) > number)  # type: ignore[misc]
            eventually(lambda left=2 - number: sum(_blocked(node) for node in five.nodes) == left)  # type: ignore[misc]
            # As the woken caller does. Its own release wakes the next one.
            won = store.acquire(NAME, f"v.{number}", TTL, request_of(notify=True, waited=True))
            assert isinstance(won, Acquired)
            # If the release comes before that mark on the server where they wait, it wakes none, and callers poll.
            eventually(lambda: not store._servers.busy)
            assert store.release(NAME, f"v.{number}", ReleaseRequest()).woke


def _blocked(node: Server) -> int:
    with node.client() as client:
        return int(client.info("clients")["blocked_clients"])


def test_silent_server_is_reported_at_the_start(five: RedlockSet, store: RedlockStore) -> None:
    assert store.info().unreachable == ()
    five.node(3).kill()
    (silent,) = store.info().unreachable
    assert f"127.0.0.1:{five.node(3).port}" in silent


def test_a_fork_has_threads_and_connections_of_its_own(store: RedlockStore) -> None:
    acquired(store, "o.1")
    pid = os.fork()
    if not pid:
        ok = False
        try:
            held = isinstance(store.acquire(NAME, "p.1", TTL, request_of()), Held)
            ok = held and store.release(NAME, "o.1", ReleaseRequest()).ours
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    acquired(store, "p.2")


def test_a_hung_server_delays_no_exit(five: RedlockSet) -> None:
    for node in five.nodes[:2]:
        node.pause()
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from celery_dlock.config.locations import locations_from_settings
from celery_dlock.store.factory import open_store
from tests.contract.helpers import NAME, request_of
store = open_store(locations_from_settings({five.lock_urls()!r}, {{}}), timeout=30, prefix="dlock")
print(type(store.acquire(NAME, "o.1", 30_000, request_of())).__name__, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "Acquired\n"
    assert process.wait(5) == 0
    process.stdout.close()


def test_an_idle_store_has_no_threads(five: RedlockSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_dlock.store.redlock.call_threads.IDLE", 0.1)
    with closing(open_store_at(five.nodes)) as store:
        before = psutil.Process().num_threads()
        acquired(store, "o.1")
        assert psutil.Process().num_threads() > before
        eventually(lambda: psutil.Process().num_threads() <= before)
        assert store.release(NAME, "o.1", ReleaseRequest()).ours
