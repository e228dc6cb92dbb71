"""An operator's look at a full store: what it costs, and what the store's other clients notice of it."""

import time
from typing import Any

import pytest
import redis

from celery_dlock.control import LockControl
from celery_dlock.keys.lock_name import shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract import queue_helpers as queue
from tests.contract.helpers import request_of, take

#: Microseconds on the server that no command may take.
LONG = 20_000
#: Unknown outcomes, and dead letters.
FEW = 20


def fill(client: redis.Redis, used: int, held: int) -> None:
    now = time.time_ns() // 1000
    by = '["app.post", "t", "node1", "77"]'
    pipe = client.pipeline(transaction=False)
    for number in range(used):
        keys = LockKeys.of("dlock", shared_name(f"used{number}"))
        pipe.set(keys.run(), "\n".join(["used", str(now), "i", "a.1", "1", by, "", "", ""]), px=3_600_000)
    for number in range(held):
        keys = LockKeys.of("dlock", shared_name(f"held{number}"))
        facts = {"acq": f"o{number}.1", "identity": "", "token": now, "task": "app.post", "id": "t"}
        pipe.hset(keys.lock, mapping={**facts, "process": "node1 77", "ttl": 3_600_000})
        pipe.pexpire(keys.lock, 3_600_000)
    pipe.execute()


@pytest.mark.timeout(400)  # 110,000 names are written and read in up to three rounds
@pytest.mark.invariant("operators-slow-no-client")
@pytest.mark.parametrize(
    ("used", "held"), [(5_000, 500), pytest.param(100_000, 10_000, marks=pytest.mark.slow)], ids=["small", "large"]
)
def test_full_store_is_read_in_steps_that_no_client_notices(
    store: RedisStore, client: Any, control: LockControl, used: int, held: int
) -> None:
    fill(client, used, held)
    for number in range(FEW):
        name = shared_name(f"died{number}")
        take(store, f"d{number}.1", request_of(f"d{number}", once=True), name=name)
        store.release(name, f"d{number}.1", ReleaseRequest(outcome_unknown=True))
        queue.take(store, f"h{number}.1", f"h{number}", name)
        queue.park(store, f"w{number}.1", f"w{number}", name)
        store.remove_waiter(name, queue.digest(f"w{number}"), "s.1", dead_letter=True)
        store.release(name, f"h{number}.1", queue.ending(f"h{number}"))
    client.config_set("slowlog-log-slower-than", LONG)
    # The server itself may have to wait for a processor: a command that is too long is so in every round.
    slow = read_all(client, control, used, held)
    for _ in range(2):
        slow = slow and slow & read_all(client, control, used, held)
    assert slow == set()


def read_all(client: Any, control: LockControl, used: int, held: int) -> set[bytes]:
    """Make each read once. Return the commands that took too long."""
    client.slowlog_reset()

    began = time.monotonic()
    first = control.locks(limit=100)
    assert (100 <= len(first.items) < 300, first.scanned < first.keys) == (True, True)
    in_first = time.monotonic() - began

    began = time.monotonic()
    assert (len(control.unknown_outcomes().items), len(control.dead_letters().items)) == (FEW, FEW)
    in_indexes = time.monotonic() - began

    began = time.monotonic()
    found = list(control.all_locks())
    in_all = time.monotonic() - began
    states = [state for view in found for state in view.states]
    assert {state: states.count(state) for state in set(states)} == {"used": used, "held": held, "unknown": FEW}
    began = time.monotonic()
    assert control.counts().locks == {"app.post": held}
    in_counts = time.monotonic() - began
    times = {"first page": in_first, "unknown and dead": in_indexes, "all": in_all, "counts": in_counts}
    print({what: round(seconds, 3) for what, seconds in times.items()})  # noqa: T201  # for a run with -s
    # On an idle machine, this takes less than 0.2 s for each list. A scan of the large store takes 20 s.
    assert in_indexes < 5.0
    return {entry["command"] for entry in client.slowlog_get(10_000)}
