"""The rules in Python and the scripts in Lua: two writings of one law, on the same random histories."""

import os
from contextlib import closing

import pytest
import redis
from hypothesis import Phase, given, settings

from tests.contract.histories import History, Step, steps
from tests.contract.two_stores import TwoStores
from tests.support.servers import Server

#: Parts of 500 histories in the slow form; `make histories` runs 20.
PARTS = int(os.environ.get("DLOCK_TEST_HISTORY_PARTS", "3"))


def run(server: Server, client: redis.Redis, history: list[Step]) -> None:
    with closing(TwoStores(server, client)) as stores:
        both = History(stores)
        for step in history:
            both.take(step)
            stores.check()


@pytest.mark.invariant("stores-agree")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "histories", [60, *(pytest.param(500, marks=pytest.mark.slow, id=f"part{part}") for part in range(PARTS))]
)
def test_memory_and_scripts_agree_on_random_histories(clean_server: Server, histories: int) -> None:
    """Every answer is equal, and at the end everything that both stores hold."""
    with closing(clean_server.client()) as client:
        # Without the phase that explains failures: it traces every line.
        @settings(max_examples=histories, phases=[Phase.generate, Phase.shrink])
        @given(steps(80))
        def agree(history: list[Step]) -> None:
            run(clean_server, client, history)

        agree()
