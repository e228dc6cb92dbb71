"""A credential provider that raises errors of its own library: the store does not answer."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from redis import CredentialProvider

from celery_dlock import singleton_task
from celery_dlock.errors import LockLost, StoreRefused, StoreUnavailable
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking.lease import Lease
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired
from tests.contract.helpers import NAME, TTL, Party, keys_of, request_of
from tests.support.polling import eventually
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server
from tests.support.stores import store_at

KEYS = keys_of()


class Provider(CredentialProvider):
    """Knows the user who may keep locks, unless a test says otherwise."""

    error: ClassVar[Exception | None] = None

    def get_credentials(self) -> tuple[str, str]:
        if self.error is not None:
            raise self.error
        return LOCK_USER, LOCK_PASSWORD


@pytest.fixture
def provider() -> Iterator[type[Provider]]:
    yield Provider
    Provider.error = None


def provided(server: Server) -> str:
    return f"redis://127.0.0.1:{server.port}/0?credential_provider={__name__}.Provider"


@pytest.mark.invariant("failing-connection-is-unavailable")
@pytest.mark.core
@pytest.mark.parametrize("error", [RuntimeError("no token\nnow"), KeyError("token"), ValueError("bad token")])
def test_failing_provider_is_a_store_that_does_not_answer(
    clean_server: Server, provider: type[Provider], error: Exception
) -> None:
    with closing(store_at(provided(clean_server), timeout=5)) as store:
        provider.error = error
        with pytest.raises(StoreUnavailable, match=f"did not answer: .*{type(error).__name__}: .*token") as caught:
            store.acquire(NAME, "o.1", TTL, request_of())
        assert not isinstance(caught.value, StoreRefused)
        assert "\n" not in str(caught.value)
        provider.error = None
        assert isinstance(store.acquire(NAME, "o.1", TTL, request_of()), Acquired)
        assert store.release(NAME, "o.1", ReleaseRequest()).ours


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded(), LockLost()])
def test_error_raised_into_the_thread_while_it_connects_is_passed_on(
    clean_server: Server, provider: type[Provider], error: Exception
) -> None:
    with closing(store_at(provided(clean_server), timeout=5)) as store:
        provider.error = error
        with pytest.raises(type(error)):
            store.inspect(NAME)


def test_failing_provider_leaves_the_call_to_on_store_error(
    clean_server: Server, provider: type[Provider], make_app: Any
) -> None:
    app = make_app(provided(clean_server), result_backend="cache+memory://")

    @singleton_task(app=app, name="provided.run", on_store_error="run")
    def run() -> str:
        return "ran"

    @singleton_task(app=app, name="provided.fail", on_store_error="fail")
    def fail() -> str:
        return "ran"

    provider.error = RuntimeError("no token")
    assert run.apply().get() == "ran"
    assert isinstance(fail.apply().result, StoreUnavailable)


@pytest.mark.invariant("failing-connection-is-unavailable")
def test_lease_loss_is_reported_while_the_provider_fails(clean_server: Server, provider: type[Provider]) -> None:
    party = Party(provided(clean_server))
    lease: Lease = party.acquire(shared_name("provided"), ttl=2)
    provider.error = RuntimeError("no token")
    with clean_server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    eventually(lambda: party.lost, within=10)
    assert lease.lost
