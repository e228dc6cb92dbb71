"""The cost and the needs of the scripts: declared keys in one slot, one command each, no memory in the server."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_dlock.keys.key_spec import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, Identity, Renewal
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import SCRIPTS
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import NAME, TTL, commands_seen, ending_of, keys_of, load_scripts, request_of, take
from tests.support.polling import eventually
from tests.support.scripts import shas
from tests.support.stores import name_in, store_at

KEYS = keys_of()
LOCK = KEYS.lock


def renewal(acquisition: str, *notes: tuple[str, str]) -> Renewal:
    return Renewal(NAME, acquisition, TTL, notes)


# One slot, one round trip


def everything(store: RedisStore) -> None:
    """Every script in every shape that has different keys."""
    take(store, "o.1")
    store.acquire(NAME, "p.1", TTL, request_of("id2", once=True))
    store.renew([renewal("o.1", ("count", "2"))])
    store.inspect(NAME)
    store.release(NAME, "o.1", ReleaseRequest(outcome_unknown=True))
    take(store, "q.1", request_of("id1", once=True, republished=True))
    store.release(NAME, "q.1", ending_of("id1", used_ms=60_000, outcome_unknown=True))
    store.acquire(NAME, "r.1", TTL, request_of("id1", once=True))
    store.forget_run(NAME)
    take(store, "s.1", request_of("id2", once=True))
    store.last_run(NAME)
    store.release(NAME, "s.1", ending_of("id2", once=True, window_ms=60_000))
    take(store, "t.1", request_of("id3", once=True))
    store.release(NAME, "t.1", ReleaseRequest(outcome_unknown=True))
    store.acquire(NAME, "u.1", TTL, request_of("id4", once=True, hold_if_unknown=True))
    store.resolve_run(NAME, sent=True, window_ms=60_000)


@pytest.mark.invariant("state-change-is-atomic")
def test_every_key_that_a_script_touches_is_declared_and_in_the_names_bucket(
    store: RedisStore, client: redis.Redis
) -> None:
    everything(store)  # so that no script's text is sent
    client.flushdb()
    with commands_seen(client) as seen:
        everything(store)
    declared: set[str] = set()
    touched = 0
    for kind, words in seen:
        if words[0] == "EVALSHA":
            count = int(words[2])
            declared = set(words[3 : 3 + count])
            assert {key.split("}")[0] for key in declared} == {LOCK.split("}")[0]}
        elif kind == "lua" and words[0].upper() != "TIME":
            keys = words[1:] if words[0].upper() == "MGET" else words[1:2]
            assert set(keys) <= declared, words
            touched += 1
    assert touched > 10


@pytest.mark.invariant("state-change-is-atomic")
@pytest.mark.core
def test_every_script_runs_on_a_cluster_node(own_server: Callable[..., Any]) -> None:
    server = own_server(options=("--cluster-enabled", "yes"))
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
        eventually(lambda: "cluster_state:ok" in str(client.execute_command("CLUSTER", "INFO")), within=10)
        store = store_at(server.url(), timeout=5)
        for number in range(20):
            name = LockName(f"lock{number}", number * 51)
            keys = LockKeys.of("dlock", name)
            take(store, "o.1", request_of("id", once=True), name=name_in(keys))
            assert store.renew([Renewal(name_in(keys), "o.1", TTL)]) == [True]
            assert store.inspect(name_in(keys)) is not None
            assert store.release(name_in(keys), "o.1", ending_of("id", used_ms=60_000, outcome_unknown=True)).ours
        everything(store)
        store.close()


@pytest.mark.core
@pytest.mark.parametrize(
    ("verb", "script"),
    [
        ("acquire", SCRIPTS["acquire"]),
        ("renew", SCRIPTS["renew"]),
        ("release", SCRIPTS["release"]),
        ("inspect", SCRIPTS["inspect"]),
    ],
)
def test_each_verb_is_one_command(store: RedisStore, client: redis.Redis, verb: str, script: Any) -> None:
    verbs: dict[str, Callable[[], object]] = {
        "acquire": lambda: store.acquire(NAME, "p.1", TTL, request_of("id2", once=True)),
        "renew": lambda: store.renew([renewal("o.1")]),
        "release": lambda: store.release(NAME, "o.1", ending_of("id1", used_ms=1, outcome_unknown=True)),
        "inspect": lambda: store.inspect(NAME),
    }
    for call in verbs.values():
        call()
    with commands_seen(client) as seen:
        verbs[verb]()
    ((verb_sent, sha),) = [words[:2] for kind, words in seen if kind != "lua"]
    assert verb_sent == "EVALSHA"
    assert sha in shas(script)


@pytest.mark.core
def test_uncontended_lock_costs_the_server_eight_commands(store: RedisStore, client: redis.Redis) -> None:
    """A plain acquire and release, command for command. A script that takes another path costs every task more."""

    def cycle() -> Acquired:
        taken = take(store, "o.1", request_of("id1"))
        assert store.release(NAME, "o.1", ending_of("id1", final=False)).ours
        return taken

    cycle()
    with commands_seen(client) as seen:
        token = str(cycle().token)
    digest = Identity("id1").digest
    holder = ["task", "app.post", "id", "id1", "process", "node1", "77", "ttl", str(TTL)]  # in words
    assert [words[0] if kind != "lua" else words for kind, words in seen] == [
        "EVALSHA",
        ["HGET", LOCK, "acq"],
        ["MGET", KEYS.last, KEYS.tombstone("o.1"), KEYS.done(digest)],
        ["TIME"],
        ["SET", KEYS.last, token],
        ["HSET", LOCK, "acq", "o.1", "identity", digest, "token", token, *holder],
        ["PEXPIRE", LOCK, str(TTL)],
        "EVALSHA",
        ["HMGET", LOCK, "acq", "dup", "notify", "has_waiters", "min_hold"],
        ["DEL", LOCK],
    ]


@pytest.mark.core
def test_every_variant_of_every_script_compiles(client: redis.Redis) -> None:
    load_scripts(client)


# A server that forgot the scripts


@pytest.mark.core
def test_a_forgotten_script_is_loaded_again(store: RedisStore, client: redis.Redis) -> None:
    for _ in range(2):
        client.script_flush()
        assert isinstance(store.acquire(NAME, "o.1", TTL, request_of()), Acquired)
        assert store.renew([renewal("o.1")] * 3) == [True, True, True]
        assert store.inspect(NAME) is not None
        assert store.release(NAME, "o.1", ReleaseRequest()).ours


def test_scripts_forgotten_in_the_middle_of_1200_renewals_are_loaded_again(
    store: RedisStore, client: redis.Redis
) -> None:
    locks = [keys_of(str(number)) for number in range(1_200)]
    for keys in locks:
        take(store, "o.1", name=name_in(keys))
    renewals = [Renewal(name_in(keys), "o.1", 60_000) for keys in locks]
    gone = {7, 600, 1_199}
    for number in gone:
        client.delete(locks[number].lock)
    over = threading.Event()

    def forget() -> None:
        while not over.is_set():
            client.script_flush()
            over.wait(0.002)

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        answers = [store.renew(renewals) for _ in range(3)]
    finally:
        over.set()
        forgetting.join()
    assert answers == [[number not in gone for number in range(1_200)]] * 3
    assert min(client.pttl(keys.lock) for n, keys in enumerate(locks) if n not in gone) > 50_000
