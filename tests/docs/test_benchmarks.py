"""The benchmarks time what they say: every call succeeds. The runs themselves are no part of the suite."""

import re
import subprocess
import sys

import redis

from benchmarks import calls, seats
from tests.support.servers import Server
from tests.support.stores import store_at


def test_every_timed_call_and_every_weighed_hold_works(clean_server: Server, client: redis.Redis) -> None:
    """Expected: our scripts, called bare, take and free their lock just as ours and redis-py's do."""
    cases = calls._cases(clean_server, client)
    for case in cases:
        case.run(2, timed=True)
        if case.hold is not None:
            case.hold(1)()
    assert [len(case.micros) for case in cases] == [2] * len(cases)
    assert client.keys("*:lock*") == client.keys("held:*") == client.keys("cycle") == []


def test_every_timed_call_of_each_limit_is_one_script(clean_server: Server, client: redis.Redis) -> None:
    """Expected: a refusal, the last free seat, a renewal and a release cost one script at each limit."""
    limits = seats.measure(store_at(clean_server.url(), timeout=5), client, times=1)
    assert [calls.limit for calls in limits] == [1, 10, 100]
    assert all(scripts == 1 for calls in limits for found in calls.found.values() for _, _, scripts in found)


def test_singleton_task_takes_few_steps_in_pool_child_and_main_process() -> None:
    """Expected: in the pool child less than half of what redis-py's lock adds, at 2,000 and 4,810 steps of Python 3.11.

    In the main process about 540 steps more than a plain task. No clock is read.
    """
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.steps"], capture_output=True, text=True, check=True
    ).stdout
    added = {kind: int(more) for kind, more in re.findall(r"^\s+(\w+)\s+\d+\s+([+]\d+)\s*$", shown, re.MULTILINE)}
    assert added["plain"] == 0
    assert 0 < added["singleton"] < 0.46 * added["locked"], shown  # a tenth more than expected
    received = {
        kind: int(more) for kind, more in re.findall(r"^\s+(\w+)(?:\s+\d+){2}\s+([+]\d+)\s*$", shown, re.MULTILINE)
    }
    assert received["plain"] == 0
    assert 0 < received["singleton"] < 600, shown
