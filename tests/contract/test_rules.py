"""The rules in Python and the scripts in Lua: two writings of one law, on the same random histories."""

import os
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

import pytest
import redis
from hypothesis import Phase, given, settings

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.model import Acquired, Debounce, Parked, Renewal, Replace, StopRequest
from celery_dlock.store.redis.keys import LockKeys
from tests.contract.histories import NAMES, REPLACED, SEATED, TTL, TURN, History, Step, steps
from tests.contract.queue_helpers import digest, ending, request_of
from tests.contract.two_stores import TwoStores
from tests.support.backends import BACKEND
from tests.support.faulty_backend import Fault, conflict, lost_reply
from tests.support.polling import eventually
from tests.support.servers import Server

#: Parts of 500 histories in the slow form; `make histories` runs 20.
PARTS = int(os.environ.get("DLOCK_TEST_HISTORY_PARTS", "3"))
FAULTS: Final = {BACKEND: None, f"{BACKEND}-conflicts": conflict, f"{BACKEND}-lost-replies": lost_reply}
#: The number of histories, and the fault. The slow form has one part with each fault, and the others without one.
HISTORIES: Final = [
    *(pytest.param(60, fault, id=way) for way, fault in FAULTS.items()),
    *(pytest.param(500, fault, marks=pytest.mark.slow, id=f"{way}-slow") for way, fault in FAULTS.items()),
    *(pytest.param(500, None, marks=pytest.mark.slow, id=f"{BACKEND}-part{part}") for part in range(1, PARTS)),
]


def run(server: Server, client: redis.Redis, history: list[Step], fault: Fault | None = None) -> None:
    with closing(TwoStores(server, client, fault=fault)) as stores:
        both = History(stores)
        for step in history:
            both.take(step)
            stores.check()


@pytest.mark.invariant("stores-agree")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("histories", "fault"), HISTORIES)
def test_memory_and_scripts_agree_on_random_histories(
    clean_server: Server, histories: int, fault: Fault | None
) -> None:
    """Every answer is equal, and at the end everything that both stores hold.

    Also if one commit of three is refused, or carried out without a reply: the engine then runs the rule again.
    """
    with closing(clean_server.client()) as client:
        # Without the phase that explains failures: it traces every line.
        @settings(max_examples=histories, phases=[Phase.generate, Phase.shrink])
        @given(steps(80))
        def agree(history: list[Step]) -> None:
            run(clean_server, client, history, fault)

        agree()


@pytest.mark.invariant("stores-agree")
def test_dead_letter_ends_when_its_message_comes_again_and_is_replaced(clean_server: Server) -> None:
    """An operator who requeued it would run the call a second time."""
    parked, newer, again = Step("acquire_queued", 0, 1, 0, 0), Step("acquire_debounced", 0, 2, 0, 0), (0, 1, 1, 0)
    dead = Step("remove", 0, 1, 0, 1)
    history = [Step("acquire", 0, 0, 0, 0), parked, newer, dead, Step("acquire_debounced", *again)]
    with closing(clean_server.client()) as client:
        run(clean_server, client, history)


@pytest.mark.invariant("stores-agree")
def test_memory_and_scripts_agree_on_older_debounced_calls(clean_server: Server) -> None:
    """Two cases that random histories seldom reach: a waiter that is due later, and a late grant of an older call."""
    with closing(clean_server.client()) as client, closing(TwoStores(clean_server, client)) as stores:

        def ask(task_id: str, rank: int, wait: int, grant_id: str = "") -> Any:
            request = request_of(task_id, parks=True, rank_us=rank, debounce=Debounce(wait, 50_000), grant_id=grant_id)
            acquisition = f"{task_id}.{stores.now_us}"
            return stores.do(lambda store: store.acquire(NAMES[0], acquisition, TTL, request))

        def sweep(seconds: float) -> Any:
            stores.travel(round(seconds * 1e6))
            granter = f"s.{stores.now_us}"
            return stores.do(lambda store: store.sweep(NAMES[0], granter, TURN, 5)).granted

        ask("a", 10, 5000)
        ask("b", 20, 0)  # replaces it, and is not due before it
        stores.check()
        assert sweep(4) is None
        stores.do(lambda store: store.remove_waiter(NAMES[0], digest("a"), "g.1", ended=True))
        granted = sweep(2)
        ask("c", 30, 5000)  # does not replace the granted call
        stores.do(lambda store: store.confirm_publish(NAMES[0], granted.identity, TURN))
        newer = sweep(61)  # its grant is lost
        assert (granted.identity, newer.identity) == (digest("b"), digest("c"))
        assert isinstance(started := ask("c", 30, 5000, newer.grant_id), Acquired), started
        stores.do(lambda store: store.release(NAMES[0], f"c.{stores.now_us}", ending("c")))
        late = ask("b", 20, 0, sweep(61).grant_id)
        assert isinstance(late, Parked)
        assert (late.evicted and late.evicted.identity, late.newer) == (digest("b"), "c")
        stores.check()


@pytest.mark.invariant("stores-agree")
def test_memory_and_scripts_agree_on_seats_above_the_limit(clean_server: Server) -> None:
    """Cases that random histories seldom reach: a release, a removal and a sweep would grant a seat above the limit."""
    larger, smaller = (NAMES[SEATED]._replace(seats=limit) for limit in (3, 2))
    with closing(clean_server.client()) as client, closing(TwoStores(clean_server, client)) as stores:

        def do(command: Callable[[Any], Any]) -> Any:
            answer = stores.do(command)
            stores.check()
            return answer

        def ask(task_id: str, name: LockName) -> Any:
            stores.travel(1)
            return do(lambda store: store.acquire(name, f"{task_id}.1", 100 * TTL, request_of(task_id, parks=True)))

        assert [ask(task_id, larger).seat for task_id in ("t0", "t1", "t2")] == [0, 1, 2]
        stores.travel(61_000_000)  # the larger limit counts no more
        assert isinstance(ask("a", smaller), Parked)
        assert do(lambda store: store.release(smaller, "t2.1", ending("t2"))).granted is None
        assert isinstance(ask("b", larger), Parked)  # the larger limit counts again, and seat 2 is granted
        assert stores.local.list_waiters(larger, 2).waiters[0].state == "granted"
        stores.travel(61_000_000)
        ask("c", smaller)
        assert do(lambda store: store.remove_waiter(smaller, digest("a"), "g.1", ended=True)).granted is None
        assert [view.state for view in stores.local.list_waiters(smaller, 5).waiters] == ["waiting", "waiting"]
        ask("d", larger)
        stores.travel(61_000_000)
        ask("e", smaller)
        assert do(lambda store: store.sweep(smaller, "s.1", TURN, 5)).granted is None
        assert stores.local.list_waiters(smaller, 5).count == 4


@pytest.mark.invariant("stores-agree")
def test_memory_and_scripts_agree_on_a_holder_that_newer_calls_ask_to_stop(clean_server: Server) -> None:
    """The first newer call asks, and each later one replaces the waiter. Few random histories have three such calls."""
    name = NAMES[REPLACED]
    with closing(clean_server.client()) as client, closing(TwoStores(clean_server, client)) as stores:
        for task_id in "abcd":
            stores.travel(1)
            request, acquisition = request_of(task_id, parks=True, replace=Replace(20_000)), f"{task_id}.1"
            stores.do(lambda store, sent=(acquisition, TTL, request): store.acquire(name, *sent))
            stores.check()
        assert stores.do(lambda store: store.renew([Renewal(name, "a.1", TTL, stoppable=True)])) == [StopRequest("b")]
        released = stores.do(lambda store: store.release(name, "a.1", ending("a", replace="stopped")))
        stores.check()
        assert released.granted.identity == digest("d")


@pytest.mark.invariant("stores-agree", "cut-scripts-leave-nothing-for-ever")
def test_finished_message_that_gives_its_seat_back_leaves_no_lock_there(clean_server: Server) -> None:
    """Another call waits, but is not due. Its mark on the taken seats must not make a lock of the free one."""
    history = [
        Step("acquire", 2, 0, 0, 134217728), Step("acquire", 2, 1, 0, 0), Step("acquire", 2, 0, 0, 196620),
        Step("acquire", 2, 0, 0, 12), Step("release", 2, 0, 0, 0), Step("release", 2, 0, 0, 3),
        Step("acquire", 2, 0, 0, 0), Step("acquire_queued", 2, 1, 0, 0), Step("release", 2, 0, 0, 4),
        Step("time_passes", 2, 0, 4, 0), Step("acquire_queued", 2, 0, 0, 0), Step("acquire", 2, 0, 0, 0),
        Step("acquire", 2, 0, 0, 0), Step("acquire_queued", 2, 0, 0, 12), Step("lose_grant", 2, 0, 1, 0),
        Step("start_granted", 2, 0, 0, 48),
    ]  # fmt: skip
    with closing(clean_server.client()) as client:
        run(clean_server, client, history)


@pytest.mark.invariant("stores-agree")
def test_memory_and_scripts_agree_on_a_place_whose_message_has_started(clean_server: Server) -> None:
    """A call had grants on two seats. Its start ends one, and a sweep takes back the other. The next sweep drops it."""
    history = [
        Step("acquire", 2, 0, 0, 0), Step("acquire", 2, 1, 0, 0), Step("acquire_queued", 2, 0, 0, 12),
        Step("acquire_queued", 2, 2, 0, 285212672), Step("start_granted", 2, 0, 0, 0), Step("time_passes", 2, 0, 4, 0),
        Step("acquire_queued", 2, 2, 0, 475004928), Step("start_granted", 2, 0, 0, 0), Step("sweep", 2, 0, 0, 0),
        Step("sweep", 2, 0, 0, 0),
    ]  # fmt: skip
    with closing(clean_server.client()) as client:
        run(clean_server, client, history)


@pytest.mark.invariant("stores-agree")
def test_hold_that_is_about_to_end_ends_in_both_stores_at_once(clean_server: Server) -> None:
    """The seconds which a busy machine needs for the steps before do not end it in the server alone."""
    with closing(clean_server.client()) as client, closing(TwoStores(clean_server, client)) as stores:
        stores.do(lambda store: store.hold(NAMES[0], "operator:me@host", 90_000, "why"))
        lock = LockKeys.of(stores.prefix, NAMES[0]).lock
        eventually(lambda: client.pttl(lock) < 89_000, within=20, message="the hold does not age")
        stores.travel(89_000_000)
        stores.check()


@pytest.mark.invariant("stores-agree")
def test_removed_waiter_whose_result_is_not_stored_is_a_dead_letter_in_both_stores(clean_server: Server) -> None:
    with closing(clean_server.client()) as client, closing(TwoStores(clean_server, client)) as stores:
        for task_id in "ab":
            request, acquisition = request_of(task_id, parks=True), f"{task_id}.1"
            stores.do(lambda store, sent=(acquisition, TTL, request): store.acquire(NAMES[0], *sent))
        for ended, kept in ((False, [digest("b")]), (True, [])):
            removed = stores.do(lambda store, end=ended: store.remove_waiter(NAMES[0], digest("b"), "g.1", ended=end))
            stores.check()
            assert removed.entry
            assert [letter.identity for letter in stores.local.dead_letters()] == kept
