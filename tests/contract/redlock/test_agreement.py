"""Tokens, idempotency keys and outcomes on which a majority agrees, and what Redlock refuses."""

import itertools
import random
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
from celery.app.trace import build_tracer

from celery_dlock import singleton_task
from celery_dlock.errors import InvalidLockOptions, StoreUnavailable
from celery_dlock.runtime import Runtime
from celery_dlock.store.model import (
    Acquired,
    Contended,
    Unknown,
    Used,
)
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redlock.store import RedlockStore
from tests.contract.helpers import NAME, TTL, request_of
from tests.contract.redlock.helpers import KEYS, acquired, answer_or_none, hold, holders, open_store_at, try_release
from tests.contract.test_interruptions import Strike, assert_no_doubt, run
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.topologies import RedlockSet

#: Lines between two that are struck: each round takes its time.
STEP = 131


@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")
def test_a_soft_limit_at_any_line_leaves_no_lock_on_any_server(five: RedlockSet, make_app: Any) -> None:
    app = make_app(five.lock_urls(), dlock_quarantine=0, result_backend="cache+memory://")
    runtime = Runtime.of(app)
    assert runtime.watchdog._loop.running.acquire(blocking=False)  # the test is its scheduler
    ended = set()

    @singleton_task(app=app, once_per=5, name="interrupted")
    def work(number: int) -> None:
        ended.add(number)

    app.finalize()
    work.__trace__ = build_tracer(work.name, work, app=app)
    for struck in itertools.count(0, STEP):
        strike = Strike(at=struck)
        run(work, struck, strike)
        runtime.watchdog.run_round()
        assert (strike.where, runtime.lease_table.records()) == (strike.where, [])  # type: ignore[attr-defined]
        keys = LockKeys.of("dlock", work.lock_spec.name_of((struck,), {}))
        eventually(lambda keys=keys: holders(five.nodes, keys) == [None] * 5, message=strike.where)  # type: ignore[misc]
        assert_no_doubt(work.used(struck), strike.where, ended=struck in ended)
        if not strike.where:
            break
    assert struck > 300


@pytest.mark.invariant("tokens-are-agreed")
def test_seed_is_the_same_for_every_run_until_one_succeeds(five: RedlockSet, store: RedlockStore) -> None:
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
        answer = store.acquire(NAME, f"o.{number}{uuid.uuid4()}", TTL, request_of("id1", once=True))
    except StoreUnavailable:
        return False
    if isinstance(answer, Acquired):
        assert answer.after_crash == (number > 0)
        seeds.append(answer.seed)
    return isinstance(answer, Acquired)


def test_a_vote_that_was_lost_is_no_death(five: RedlockSet, store: RedlockStore) -> None:
    for place, acquisition in enumerate(["a.1", "a.1", "b.1", "b.1"]):
        hold(five.node(place), acquisition)
    assert isinstance(store.acquire(NAME, "o.1", TTL, request_of("id1", once=True)), Contended)
    for node in five.nodes[:4]:
        with node.client() as client:
            client.delete(KEYS.lock)
    answer = acquired(store, "o.2", request_of("id1", once=True, hold_if_unknown=True))
    assert not answer.after_crash


def test_body_that_died_blocks_the_next_call_with_any_two_servers_away(five: RedlockSet, store: RedlockStore) -> None:
    five.node(0).kill()
    five.node(1).kill()
    acquired(store, "o.1", request_of("id1", once=True))
    five.node(0).start()
    five.node(1).start()
    for node in five.nodes:
        with node.client() as client:
            client.delete(KEYS.lock)
    five.node(3).kill()
    five.node(4).kill()
    answer = eventually(lambda: answer_or_none(store, request_of("id2", once=True, hold_if_unknown=True)))
    assert isinstance(answer, Unknown)
    assert store.resolve_run(NAME, sent=True, window_ms=TTL)
    assert isinstance(answer_or_none(store, request_of("id2", once=True)), Used)


@pytest.mark.invariant("tokens-are-agreed", "redlock-tokens-grow")
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_grow_strictly_under_all_faults(five: RedlockSet, seed: int) -> None:
    """Of three servers one at a time is away; another owner takes the lock whenever the last one's lease is over."""
    nodes, chance = five.nodes[:3], random.Random(seed)
    tokens: list[int] = []
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(node.port or 0)) for node in nodes]
        store = stack.enter_context(closing(open_store_at(proxies, timeout=0.3)))
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
            answer = store.acquire(NAME, acquisition, 3_000, request_of())
        except StoreUnavailable:
            answer = None
        try_release(store, acquisition)
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
    assert acquired(store, "o.1").token == 3_000_000_000_000_001
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
    assert acquired(store, "o.1").token == 3_000_000_000_000_001


def test_an_option_that_it_refuses_is_refused_where_the_task_is_defined(five: RedlockSet, make_app: Any) -> None:
    for options, words in (
        ({"on_conflict": "queue"}, "on_conflict='queue'"),
        ({"on_conflict": "replace"}, "on_conflict='replace'"),
        ({"unique": "queued"}, "unique='queued'"),
    ):

        def body() -> None: ...

        with pytest.raises(InvalidLockOptions, match=rf"task 'x': invalid {words}: several servers"):
            singleton_task(app=make_app(five.lock_urls()), name="x", **options)(body).run()

    @singleton_task(app=make_app(five.lock_urls()), name="y")
    def plain() -> None: ...

    with pytest.raises(InvalidLockOptions, match="task 'y': invalid on_conflict='queue': several servers"):
        plain.apply_async(dlock={"on_conflict": "queue"})
