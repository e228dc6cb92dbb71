"""Five independent servers, and their store."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_dlock.store.redlock.store import RedlockStore
from tests.contract.redlock.helpers import open_store_at
from tests.support.topologies import RedlockSet


@pytest.fixture(scope="module")
def own_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedlockSet]:
    """Five servers that keep their data, for tests that break some; each finds them whole and empty."""
    with RedlockSet(tmp_path_factory.mktemp("redlock"), nodes=5, persistent=True) as made:
        yield made


@pytest.fixture
def five(own_set: RedlockSet) -> RedlockSet:
    for node in own_set.nodes:
        if not node.running:
            node.start()
        node.resume()
    own_set.flush()
    return own_set


@pytest.fixture
def store(five: RedlockSet) -> Iterator[RedlockStore]:
    with closing(open_store_at(five.nodes)) as made:
        yield made
