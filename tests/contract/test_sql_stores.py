"""Both SQL stores: transactions of many connections, and what their plain paths leave to the rules."""

import random
import threading
from contextlib import closing

import pytest

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Acquired, AcquireRequest, Identity, Renewal
from tests.contract.helpers import NAME, TTL, request_of
from tests.support.polling import eventually

pytestmark = pytest.mark.servers

DRIVERS = {"postgresql": "psycopg", "mariadb": "pymysql"}


@pytest.fixture(params=DRIVERS)
def url(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(DRIVERS[request.param], reason="installed in the main lane only")
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.mark.invariant("state-change-is-atomic")
def test_acquires_of_many_connections_exclude_one_another(url: str) -> None:
    """Plain statements and transactions, for names that exist and for names that do not."""
    names = [LockName(f"n{number}:{number:032x}", number) for number in range(30)]
    stolen: list[str] = []
    tokens: dict[LockName, list[int]] = {name: [] for name in names}

    def work(number: int) -> None:
        chance = random.Random(number)
        with closing(open_store([StoreLocation.of(url)], timeout=10, prefix="dlock")) as store:
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


def test_plain_paths_leave_to_the_rules_what_is_not_plain(url: str) -> None:
    """A done mark, a tombstone, a holder, an expired lease, or an option. Then nothing is written."""
    with closing(open_store([StoreLocation.of(url)], timeout=10, prefix="dlock")) as store:
        assert isinstance(store, EngineStore)
        backend = store.backend

        def refuses(acquisition: str, request: AcquireRequest) -> bool:
            return backend.acquire_plain(NAME, acquisition, TTL, request) is None and store.inspect(NAME) == holder

        holder = None
        store.mark_done(NAME, Identity("finished").digest, "o", 0)
        assert refuses("o.1", request_of("finished"))
        store.release(NAME, "o.2", ReleaseRequest(outcome_unknown=True))
        assert refuses("o.2", request_of("other"))
        assert refuses("o.3", request_of("other", min_hold_ms=1))
        assert refuses("o.3", request_of("other", once=True))
        assert isinstance(backend.acquire_plain(NAME, "o.3", 300, request_of("other")), Acquired)
        assert backend.acquire_plain(NAME, "o.4", TTL, request_of("finished")) is None
        assert backend.release_plain(NAME, "o.4", ReleaseRequest()) is None
        assert backend.release_plain(NAME, "o.3", ReleaseRequest(queue=True)) is None
        assert list(backend.renew_plain([Renewal(NAME, "o.4", TTL), Renewal(NAME, "o.3", 300)], None)) == [None, True]
        eventually(lambda: store.inspect(NAME) is None)
        assert refuses("o.5", request_of("other"))
        assert backend.release_plain(NAME, "o.3", ReleaseRequest()) is None
        assert list(backend.renew_plain([Renewal(NAME, "o.3", TTL)], None)) == [None]
