"""Both SQL stores: transactions of many connections, and what their plain paths leave to the rules."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.backend import Conflict, Wanted
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Acquired, AcquireRequest, Identity, Parked, QueueRequest, Renewal
from tests.contract.helpers import NAME, TTL, request_of
from tests.contract.sql_helpers import a_store, connected_user, execute, server_url
from tests.support.polling import eventually

pytestmark = pytest.mark.servers

OTHER = LockName(f"other:{'2' * 32}", NAME.bucket)


@pytest.mark.invariant("state-change-is-atomic")
def test_acquires_of_many_connections_exclude_one_another(sql_url: str) -> None:
    """Plain statements and transactions, for names that exist and for names that do not."""
    names = [LockName(f"n{number}:{number:032x}", number) for number in range(30)]
    stolen: list[str] = []
    tokens: dict[LockName, list[int]] = {name: [] for name in names}

    def work(number: int) -> None:
        chance = random.Random(number)
        with closing(open_store([StoreLocation.of(sql_url)], timeout=10, prefix="dlock")) as store:
            for step in range(60):
                name, acquisition = names[step // 2], f"o{number}.{step}"
                # A copy that may be one of a finished message is not plain: the rules decide.
                request = request_of(f"t{number}", redelivered=chance.random() < 0.5)
                got = store.acquire(name, acquisition, 60_000, request)
                if isinstance(got, Acquired):
                    tokens[name].append(got.token)
                    released = store.release(name, acquisition, ReleaseRequest(queue=chance.random() < 0.5))
                    stolen.extend([] if released.ours else [acquisition])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert stolen == []
    assert all(of_name == sorted(set(of_name)) for of_name in tokens.values())
    assert all(tokens.values())


def test_plain_paths_leave_to_the_rules_what_is_not_plain(sql_url: str) -> None:
    """A done mark, a tombstone, a holder, an expired lease, or an option. Then nothing is written."""
    with closing(open_store([StoreLocation.of(sql_url)], timeout=10, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        backend = store.backend

        def refuses(acquisition: str, request: AcquireRequest) -> bool:
            return backend.acquire_plain(NAME, acquisition, TTL, request) is None and store.inspect(NAME) is None

        store.mark_done(NAME, Identity("finished").digest, "o", 0)
        assert refuses("o.1", request_of("finished"))
        store.release(NAME, "o.2", ReleaseRequest(outcome_unknown=True))
        assert refuses("o.2", request_of("other"))
        assert refuses("o.3", request_of("other", min_hold_ms=1))
        assert refuses("o.3", request_of("other", once=True))
        assert isinstance(backend.acquire_plain(NAME, "o.3", 300, request_of("other")), Acquired)
        assert backend.acquire_plain(NAME, "o.4", TTL, request_of("another")) is None
        assert backend.release_plain(NAME, "o.4", ReleaseRequest()) is None
        assert backend.release_plain(NAME, "o.3", ReleaseRequest(queue=True)) is None
        assert list(backend.renew_plain([Renewal(NAME, "o.4", TTL), Renewal(NAME, "o.3", 300)], None)) == [None, True]
        eventually(lambda: store.inspect(NAME) is None)
        assert refuses("o.5", request_of("other"))
        assert backend.release_plain(NAME, "o.3", ReleaseRequest()) is None
        assert list(backend.renew_plain([Renewal(NAME, "o.3", TTL)], None)) == [None]


def test_name_unused_for_ten_minutes_is_removed_and_its_tokens_do_not_go_back(sql_url: str) -> None:
    high = (1 << 62) + 5
    with closing(open_store([StoreLocation.of(sql_url)], timeout=10, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        for name in (NAME, OTHER):
            assert isinstance(store.acquire(name, "o.1", TTL, request_of()), Acquired)
        backend: Any = store.backend
        execute(
            store,
            "UPDATE dlock_name SET owner = NULL, until_us = 0, since_us = since_us - 601000000, token = %s"
            " WHERE name = %s",
            high,
            backend.key(NAME),
        )
        store.list_due_queues([NAME.bucket], 10)
        assert execute(store, "SELECT name FROM dlock_name") == [(backend.key(OTHER),)]
        taken = backend.acquire_plain(NAME, "o.2", TTL, request_of())
        assert isinstance(taken, Acquired)
        assert taken.token == high + 1


def test_row_that_another_transaction_has_locked_delays_no_other_renewal(sql_url: str) -> None:
    """A process that is stopped within a transaction keeps its row locked for seconds."""
    with closing(open_store([StoreLocation.of(sql_url)], timeout=2, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        for name in (NAME, OTHER):
            assert isinstance(store.acquire(name, "o.1", TTL, request_of()), Acquired)
        with store.backend.open(NAME, Wanted()):
            plain = store.backend.renew_plain([Renewal(NAME, "o.1", TTL), Renewal(OTHER, "o.1", TTL)], None)
            assert list(plain) == [None, True]
            assert store.renew([Renewal(NAME, "o.1", TTL), Renewal(OTHER, "o.1", TTL)]) == [None, True]
        assert store.renew([Renewal(NAME, "o.1", TTL), Renewal(OTHER, "o.1", TTL)]) == [True, True]


def test_removal_that_has_to_wait_for_another_transaction_does_not_stop_the_sweeps(sql_url: str) -> None:
    with closing(open_store([StoreLocation.of(sql_url)], timeout=1, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        parks = request_of("b")._replace(queue=QueueRequest("entry"))
        store.acquire(NAME, "a.1", TTL, request_of("a")._replace(queue=QueueRequest()))
        assert isinstance(store.acquire(NAME, "b.1", TTL, parks), Parked)
        store.acquire(OTHER, "o.1", TTL, request_of())
        # An old row, so that a removal writes the token floor, which another transaction has locked.
        backend: Any = store.backend
        execute(
            store, "UPDATE dlock_name SET owner = NULL, until_us = 0, since_us = 1 WHERE name = %s", backend.key(OTHER)
        )
        with backend.pool.lent() as connection:
            run = connection.ask if hasattr(connection, "ask") else connection.execute
            table = f'"{backend.pool.schema}".dlock_meta' if hasattr(backend.pool, "schema") else "dlock_meta"
            run("BEGIN")
            run(f"SELECT v FROM {table} WHERE k = 'token_floor' FOR UPDATE")
            assert store.list_due_queues([NAME.bucket], 10, within=1e6) == [NAME]
            run("ROLLBACK")


def test_transaction_that_ends_in_a_deadlock_is_a_conflict(sql_url: str) -> None:
    """So the engine runs the rule again. At the timeout it raises StoreBusy, which ``on_store_error`` handles."""
    with closing(open_store([StoreLocation.of(sql_url)], timeout=5, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        backend: Any = store.backend
        for name in (NAME, OTHER):
            store.acquire(name, "o.1", TTL, request_of())
        met, texts = threading.Barrier(2, timeout=10), []

        def lock(mine: LockName, other: LockName) -> None:
            try:
                with backend.open(mine, Wanted()) as session:
                    met.wait()
                    session._ask(session._sql.lock, (backend.key(other),))
            except Conflict as conflict:
                texts.append(str(conflict))

        threads = [threading.Thread(target=lock, args=pair) for pair in ((NAME, OTHER), (OTHER, NAME))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(texts) == 1
        assert "another transaction had locked the row" in texts[0]
        assert store.renew([Renewal(NAME, "o.1", TTL), Renewal(OTHER, "o.1", TTL)]) == [True, True]


def floor_after_removal(store: EngineStore) -> int:
    """Remove the row, which no acquire uses now, and return the floor of all tokens. Only a removal raises it."""
    backend: Any = store.backend
    execute(store, "UPDATE dlock_name SET since_us = since_us - 601000000")
    backend._remove(backend._start)
    ((floor,),) = execute(store, "SELECT v FROM dlock_meta WHERE k = 'token_floor'")
    return int(floor)


@pytest.mark.invariant("tokens-never-decrease")
def test_tokens_do_not_go_back_while_unused_rows_are_removed(sql_url: str) -> None:
    """In each round, the row counts as unused. Two acquires meet its removal."""
    rounds, tokens = 100, [1 << 62]
    together = threading.Barrier(3)

    def work(store: EngineStore, number: int) -> None:
        for step in range(rounds):
            acquisition = f"o{number}.{step}"
            together.wait(30)
            got = store.acquire(NAME, acquisition, 60_000, request_of(f"t{number}"))
            if isinstance(got, Acquired):
                tokens.append(got.token)
                assert store.release(NAME, acquisition, ReleaseRequest()).ours
            together.wait(30)

    with closing(open_store([StoreLocation.of(sql_url)], timeout=10, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        backend: Any = store.backend
        store.acquire(NAME, "first.1", TTL, request_of())
        store.release(NAME, "first.1", ReleaseRequest())
        # Ahead of the clock, which would hide a token that went back.
        execute(store, "UPDATE dlock_name SET token = %s", tokens[0])
        with ThreadPoolExecutor(2) as threads:
            acquires = [threads.submit(work, store, number) for number in range(2)]
            for _ in range(rounds):
                execute(store, "UPDATE dlock_name SET since_us = since_us - 601000000")
                together.wait(30)
                backend._remove(backend._start)  # without its pause of a second
                together.wait(30)
        assert [each.result() for each in acquires] == [None, None]
        assert floor_after_removal(store) == tokens[-1]
    assert tokens == sorted(set(tokens))
    assert len(tokens) > rounds


def test_store_that_loses_data_at_a_restart_names_the_setting_that_keeps_it(sql_url: str) -> None:
    """The tests' PostgreSQL runs with ``fsync=off``; MariaDB is durable by default."""
    with closing(a_store(sql_url)) as store, connected_user(server_url(sql_url)) as user:
        if sql_url.startswith("postgresql"):
            assert store.info().durability_cure == "set fsync=on"
            return
        assert store.info().durable
        user.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        try:
            assert store.info().durability_cure == "set innodb_flush_log_at_trx_commit=1"
        finally:
            user.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
