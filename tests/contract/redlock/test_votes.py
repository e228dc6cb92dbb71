"""A majority of independent servers decides: who holds, who lost, and which servers count."""

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import pytest

from celery_dlock.errors import LockLost, ReplyLost, StoreNotReady, StoreUnavailable
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking.lease import Lease
from celery_dlock.locking.waiting import POLL
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import (
    Acquired,
    AcquireRequest,
    Contended,
    Held,
    Identity,
    Renewal,
    Used,
)
from celery_dlock.store.redlock.store import PAUSES, RedlockStore
from tests.contract.helpers import NAME, TTL, Party, ending_of, keys_of, request_of
from tests.contract.redlock.helpers import (
    KEYS,
    TIMEOUT,
    acquired,
    answer_or_none,
    can_acquire,
    hold,
    holders,
    of_one,
    open_store_at,
    refuse_threads,
    try_release,
)
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import LOCK_USER, Server
from tests.support.stores import name_in
from tests.support.topologies import RedlockSet


@pytest.mark.invariant("majority-decides")
def test_a_lost_vote_is_split_and_leaves_nothing_of_the_loser(five: RedlockSet, store: RedlockStore) -> None:
    """Two others hold two servers each. No owner has a majority, so none is shown as the holder."""
    for place, acquisition in enumerate(["a.1", "a.1", "b.1", "b.1"]):
        hold(five.node(place), acquisition)
    assert isinstance(store.acquire(NAME, "o.1", TTL, request_of("id1", once=True)), Contended)
    eventually(lambda: holders(five.nodes) == ["a.1", "a.1", "b.1", "b.1", None])
    assert store.inspect(NAME) is None
    assert store.last_run(NAME) is None


def test_split_vote_is_repeated_after_random_pauses_and_then_refused(five: RedlockSet, store: RedlockStore) -> None:
    for place, acquisition in enumerate(["a.1", "a.1", "b.1", "b.1"]):
        hold(five.node(place), acquisition)
    answer = store.acquire(NAME, "o.1", TTL, request_of("id1"))
    assert isinstance(answer, Contended)
    assert all(0 <= pause <= longest for pause, longest in zip(answer.pauses, PAUSES, strict=True))
    party = Party(five.lock_urls(), timeout=TIMEOUT)
    with closing(party.store), pytest.raises(StoreNotReady, match="several callers asked for"):
        party.acquire(NAME)


@pytest.mark.invariant("majority-decides")
def test_lease_on_a_minority_blocks_no_caller(five: RedlockSet, store: RedlockStore) -> None:
    hold(five.node(0), "dead.1")
    hold(five.node(1), "dead.2")
    acquired(store, "o.1")
    assert eventually(lambda: holders(five.nodes) == ["dead.1", "dead.2", "o.1", "o.1", "o.1"])


def test_holder_of_a_majority_is_the_holder(five: RedlockSet, store: RedlockStore) -> None:
    for node in five.nodes[1:4]:
        hold(node, "a.1")
    answer = store.acquire(NAME, "o.1", TTL, request_of())
    assert isinstance(answer, Held)
    assert answer.holder.owner == "a"
    eventually(lambda: holders(five.nodes) == [None, "a.1", "a.1", "a.1", None])


def test_name_that_a_majority_knows_as_used_is_used(five: RedlockSet, store: RedlockStore) -> None:
    for node in five.nodes[:2]:
        node.kill()
    acquired(store, "o.1", request_of("id1", once=True))
    store.release(NAME, "o.1", ending_of("id1", used_ms=TTL, once=True))
    for node in five.nodes[:2]:
        node.start()
    for node in five.nodes[3:]:
        node.kill()
    # One of the three that answer knows.
    assert isinstance(eventually(lambda: answer_or_none(store, request_of("id2", once=True))), Used)
    use = store.last_run(NAME)
    assert use is not None
    assert use.state == "used"


@pytest.mark.invariant("majority-decides")
def test_two_that_race_get_it_one_at_a_time_and_one_of_them_each_time(five: RedlockSet) -> None:
    rounds = 200
    urls, together = five.lock_urls(), threading.Barrier(2, timeout=60)
    wins: list[list[object]] = [[], []]

    def race(place: int) -> None:
        party = Party(urls, timeout=TIMEOUT)
        for number in range(rounds):
            together.wait()
            name = shared_name(f"race {number % 7}")
            answer = party.lock_client.acquire(name, party.context, 30.0, AcquireRequest(party.context.requester))
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
    """Eight owners wait for one lock, one after the other. None is inside with another, and tokens grow."""
    urls, name = five.lock_urls(), shared_name("crowd")
    inside: list[int] = []
    tokens: list[int] = []
    overlaps: list[int] = []

    def work(party: Party) -> None:
        for _ in range(5):
            context = party.new_context()
            lease = party.lock_client.acquire_within(name, context, 30.0, AcquireRequest(context.requester), 60.0)
            assert isinstance(lease, Lease), lease
            inside.append(1)
            overlaps.append(len(inside))
            tokens.append(lease.token or 0)
            inside.pop()
            party.lock_client.release(lease, context)

    parties = [Party(urls, timeout=TIMEOUT) for _ in range(8)]
    crowd = [threading.Thread(target=work, args=(party,)) for party in parties]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join(100)
    assert len(tokens) == 40
    assert set(overlaps) == {1}
    assert tokens == sorted(set(tokens))


@contextmanager
def led_astray(five: RedlockSet) -> Iterator[tuple[RedlockStore, list[Server]]]:
    """A store that has held locks on three servers; now the third name leads to the first one."""
    nodes = list(five.nodes[:3])
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in nodes]
        store = stack.enter_context(closing(open_store_at(proxies)))
        for number in range(3):
            acquired(store, f"w.{number}")
            store.release(NAME, f"w.{number}", ReleaseRequest())
        eventually(lambda: holders(nodes) == [None] * 3)
        proxies[2].lead_to(nodes[0].port or 0)
        yield store, nodes


def not_taken(store: RedlockStore) -> str:
    """Ask for a lock that may not be granted; why it was not."""
    try:
        answer = store.acquire(NAME, f"o.{uuid.uuid4()}", TTL, request_of())
    except StoreUnavailable as error:
        return str(error)
    assert isinstance(answer, Contended)
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
            assert isinstance(store.acquire(NAME, "o.1", TTL, request_of()), Contended)
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
        with closing(open_store_at(nodes, timeout=30)) as store:
            began = time.monotonic()
            assert isinstance(store.acquire(NAME, "o.1", 60 * TTL, request_of()), Acquired)
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
    with closing(open_store_at(five.nodes, timeout=30)) as store:
        for node in store._servers.members[:3]:
            monkeypatch.setattr(node.store, "info", lambda: silent.wait(30))
        began = time.monotonic()
        assert isinstance(store.acquire(NAME, "o.1", 5_000, request_of()), Acquired)
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
        store = stack.enter_context(closing(open_store_at(proxies)))
        acquired(store, "o.1")
        eventually(lambda: not store._servers.busy)
        for proxy, node in zip(proxies, [*nodes[1:], nodes[0]], strict=True):
            proxy.lead_to(node.port or 0)
        eventually(lambda: _renewed_by_all(store, nodes))
        eventually(lambda: try_release(store, "o.1") and holders(nodes) == [None] * 3)
        eventually(lambda: can_acquire(store, "p"))


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


def test_lease_lives_with_a_majority_and_is_not_restored_on_a_server_that_lost_it(
    five: RedlockSet, store: RedlockStore
) -> None:
    acquired(store, "o.1")
    eventually(lambda: holders(five.nodes) == ["o.1"] * 5)
    renewal = Renewal(NAME, "o.1", 60_000)
    for node in five.nodes[:2]:
        node.flush()
    assert store.renew([renewal]) == [True]
    assert holders(five.nodes) == [None, None, "o.1", "o.1", "o.1"]
    five.node(2).flush()
    assert store.renew([renewal]) == [False]


@pytest.mark.invariant("majority-decides")
def test_lease_without_a_majority_is_neither_renewed_nor_lost(five: RedlockSet, store: RedlockStore) -> None:
    acquired(store, "o.1")
    took_too = store.acquire(shared_name("y"), "o.2", TTL, request_of())
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
def test_watchdog_reports_a_lease_that_no_majority_renews(five: RedlockSet) -> None:
    party = Party(five.lock_urls(), timeout=0.3)
    lease = party.acquire(shared_name("kept"), ttl=6)
    for node in five.nodes[:3]:
        node.pause()
    eventually(lambda: party.lost, within=10)
    assert lease.lost
    with pytest.raises(LockLost):
        lease.ensure()


def test_watchdog_renews_a_lease_while_two_of_five_hang(five: RedlockSet) -> None:
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
    acquired(store, "o.1")
    for node in five.nodes[:3]:
        node.kill()
    with pytest.raises(ReplyLost):
        store.release(NAME, "o.1", ReleaseRequest())
    for node in five.nodes[:3]:
        node.start()
    # A server that was silent is left in peace for a moment, so the last one may hear of it by a later call.
    eventually(lambda: try_release(store, "o.1") and holders(five.nodes) == [None] * 5)


def test_majority_whose_threads_can_be_started_gives_the_lock(
    store: RedlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, 3)
    acquired(store, "o.1")


def test_no_majority_of_threads_is_a_store_that_does_not_answer_and_leaves_no_lock(
    five: RedlockSet, store: RedlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, 2)
    with pytest.raises(StoreUnavailable, match="it was not asked: can't start new thread"):
        acquired(store, "o.1")
    monkeypatch.undo()
    store.release(NAME, "o.1", ReleaseRequest(outcome_unknown=True))
    eventually(lambda: holders(five.nodes) == [None] * 5 and not store._servers.busy)


@pytest.mark.invariant("no-wake-up-is-lost")
def test_waiter_that_asked_while_the_release_was_on_its_way_asks_again_soon(
    five: RedlockSet, store: RedlockStore
) -> None:
    """The server that it listens to had executed the release when the waiter asked. It has no other to announce."""
    acquired(store, "o.1")
    with of_one(five.nodes[NAME.bucket % 5]) as preferred:
        assert preferred.release(NAME, "o.1", ReleaseRequest()).ours
    assert isinstance(store.acquire(NAME, "w.1", TTL, request_of(notify=True)), Held)
    store.release(NAME, "o.1", ReleaseRequest())
    began = time.monotonic()
    assert not store.release_listener(NAME).wait(POLL)
    assert time.monotonic() - began < POLL / 4
    acquired(store, "w.1")


@pytest.mark.invariant("hold-times-are-kept")
@pytest.mark.parametrize("once", [False, True])
def test_call_that_loses_its_vote_leaves_no_server_kept_by_min_hold(
    five: RedlockSet, store: RedlockStore, once: bool
) -> None:
    """Its body has not run. Otherwise, after some lost votes a majority refuses all calls for ``min_hold``."""
    for node in five.nodes[:3]:
        hold(node, "a.1")
    refused = store.acquire(NAME, "w.1", TTL, request_of("id1", min_hold_ms=60_000, once=once))
    assert isinstance(refused, Held)
    eventually(lambda: holders(five.nodes) == ["a.1", "a.1", "a.1", None, None])
