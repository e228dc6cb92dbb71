"""An operator acts on the servers one by one, each in an app of its own. A majority of them decides."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery

from celery_dlock.control import LockControl
from celery_dlock.store.model import Used
from celery_dlock.store.redlock.store import RedlockStore
from tests.contract.helpers import NAME, TTL, ending_of, request_of
from tests.contract.majority import Settled
from tests.contract.redlock.helpers import acquired, can_acquire
from tests.support.servers import LOCK_PASSWORD, OPERATOR_USER
from tests.support.topologies import RedlockSet


@pytest.fixture
def settled(store: RedlockStore) -> Any:
    """The store; each of its calls ends when every server has answered."""
    return Settled(store)


@pytest.fixture
def controls(five: RedlockSet) -> Iterator[list[LockControl]]:
    with ExitStack() as stack:
        yield [stack.enter_context(LockControl(app_of(node.port))) for node in five.nodes]


def app_of(port: int | None) -> Celery:
    app = Celery("operator", broker="memory://", set_as_current=False)
    app.conf.dlock_url = f"redis://{OPERATOR_USER}:{LOCK_PASSWORD}@127.0.0.1:{port}/0"
    return app


def test_release_by_an_operator_frees_the_lock_when_a_majority_has_done_it(
    settled: Any, controls: list[LockControl]
) -> None:
    acquired(settled, "o.1")
    for control in controls[:2]:
        control.release(NAME.text, "o.1", force=True)
    assert not can_acquire(settled, "p")
    controls[2].release(NAME.text, "o.1", force=True)
    assert can_acquire(settled, "p")


def test_hold_by_an_operator_excludes_calls_when_a_majority_has_it(settled: Any, controls: list[LockControl]) -> None:
    assert [control.hold(NAME.text, 60, "repair") for control in controls[:2]] == [True, True]
    assert can_acquire(settled, "p")
    assert controls[2].hold(NAME.text, 60, "repair")
    assert not can_acquire(settled, "p")
    assert [control.unhold(NAME.text) for control in controls[:3]] == [True, True, True]
    assert can_acquire(settled, "p")


def test_name_is_used_until_more_than_a_minority_has_forgotten_it(settled: Any, controls: list[LockControl]) -> None:
    """A mark that two of five servers still have may count again: an operator forgets it on every server."""
    acquired(settled, "o.1", request_of("id1", once=True))
    settled.release(NAME, "o.1", ending_of("id1", used_ms=60_000, once=True))
    again = request_of("id2", once=True)
    for control in controls[:3]:
        assert isinstance(settled.acquire(NAME, "p.1", TTL, again), Used)
        assert control.forget(NAME.text)
    for control in controls[3:]:
        assert control.forget(NAME.text)
    acquired(settled, "p.2", again)
