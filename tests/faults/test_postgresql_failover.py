"""Locks in PostgreSQL while its replica is promoted, with synchronous_commit=remote_apply: nothing is forgotten."""

from contextlib import closing

import pytest

from celery_dlock.errors import StoreUnavailable
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.factory import open_migrator, open_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Acquired, Duplicate, Held, Renewal
from tests.contract.helpers import NAME, TTL, ending_of, request_of
from tests.support.polling import eventually
from tests.support.postgresql import running_replica_pair

pytestmark = pytest.mark.servers

OTHER = LockName(f"other:{'2' * 32}", 5)


def test_promoted_replica_knows_every_lock_and_mark() -> None:
    with running_replica_pair() as pair:
        location = StoreLocation.of(pair.url("synchronous_commit=remote_apply"))
        open_migrator([location], timeout=10).migrate()
        with closing(open_store([location], timeout=10, prefix="dlock")) as store:
            held = store.acquire(NAME, "a.1", 10 * TTL, request_of("a"))
            assert isinstance(held, Acquired)
            assert isinstance(store.acquire(OTHER, "b.1", TTL, request_of("b", redelivered=True)), Acquired)
            assert store.release(OTHER, "b.1", ending_of("b")).ours
            pair.fail_over()

            def renewed() -> bool:
                try:
                    return store.renew([Renewal(NAME, "a.1", 10 * TTL)]) == [True]
                except StoreUnavailable:
                    return False

            eventually(renewed, within=20)
            assert isinstance(store.acquire(NAME, "c.1", TTL, request_of("c")), Held)
            assert isinstance(store.acquire(OTHER, "b.2", TTL, request_of("b", redelivered=True)), Duplicate)
            assert store.release(NAME, "a.1", ReleaseRequest()).ours
            after = store.acquire(NAME, "c.2", TTL, request_of("c"))
            assert isinstance(after, Acquired)
            assert after.token > held.token
