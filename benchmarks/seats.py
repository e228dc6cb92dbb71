"""The cost of a call under `limit=N` by N: `python -m benchmarks.seats`, about 10 seconds.

For each N there is a name whose seats are all held, and a name with one free seat. The limits take turns, and each
value is a median. The server's time is what its `INFO commandstats` counts for EVALSHA.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

import redis

from benchmarks.tables import table
from benchmarks.targets import Target
from celery_dlock.keys.lock_name import LockName, shared_name
from celery_dlock.store.base import LockStore, ReleaseRequest
from celery_dlock.store.model import Acquired, AcquireRequest, Held, Identity, Renewal, Requester
from tests.support.servers import Server
from tests.support.stores import store_at

LIMITS: Final = (1, 10, 100)
#: Calls of each kind for each limit.
TIMES: Final = 300
TTL_MS: Final = 3600_000
#: The most time in µs that the server may need for a call at the highest limit.
MOST_MICROS: Final = 1000.0

T = TypeVar("T")


class Calls:
    """The calls of one limit, timed.

    Args:
        store: The store.
        client: A client of its server, which reads the server's statistics.
        limit: The limit.
    """

    def __init__(self, store: LockStore, client: redis.Redis, limit: int) -> None:
        self._store, self._client, self.limit = store, client, limit
        self._full, self._free = (shared_name(f"{which} {limit}")._replace(seats=limit) for which in ("full", "free"))
        #: Client's time, server's time and scripts of each call, by the kind of the call.
        self.found: defaultdict[str, list[tuple[float, int, int]]] = defaultdict(list)
        self._number = 0
        for seat in range(limit):
            self._take(self._full, f"full{seat}")
        for seat in range(limit - 1):
            self._take(self._free, f"free{seat}")

    def run(self) -> None:
        """Make one call of each kind."""
        self._number += 1
        call = f"call{self._number}"
        for kind, notify in (("refused", False), ("refused under wait", True)):
            refused = self._timed(kind, lambda notify=notify: self._ask(self._full, call, notify=notify))  # type: ignore[misc]  # mypy infers no default's type
            _check(isinstance(refused, Held), kind)
        taken = self._timed("takes the last free seat", lambda: self._take(self._free, call))
        _check(taken.seat == self.limit - 1, "takes the last free seat")
        renewal = Renewal(self._free, f"{call}.1", TTL_MS)
        renewed = self._timed("renews that seat", lambda: self._store.renew([renewal]))
        _check(renewed == [True], "renews that seat")
        ending = ReleaseRequest(identity=Identity(call).digest, final=True)
        released = self._timed("releases it", lambda: self._store.release(self._free, f"{call}.1", ending))
        _check(released.ours, "releases it")

    def _ask(self, name: LockName, task_id: str, *, notify: bool = False) -> object:
        requester = Requester.of("bench.task", task_id, "bench@localhost", 77)
        request = AcquireRequest(requester, Identity(task_id), notify=notify)
        return self._store.acquire(name, f"{task_id}.1", TTL_MS, request)

    def _take(self, name: LockName, task_id: str) -> Acquired:
        taken = self._ask(name, task_id)
        if not isinstance(taken, Acquired):
            raise TypeError(f"{task_id} was refused: {taken}")
        return taken

    def _timed(self, kind: str, call: Callable[[], T]) -> T:
        scripts, micros = self._executed()
        began = time.perf_counter()
        answer = call()
        took = (time.perf_counter() - began) * 1e6
        scripts_after, micros_after = self._executed()
        self.found[kind].append((took, micros_after - micros, scripts_after - scripts))
        return answer

    def _executed(self) -> tuple[int, int]:
        found = self._client.info("commandstats").get("cmdstat_evalsha", {"calls": 0, "usec": 0})
        return found["calls"], found["usec"]


def measure(store: LockStore, client: redis.Redis, times: int = TIMES) -> list[Calls]:
    """Time each kind of call for each limit. The first call of each kind loads its script and does not count."""
    limits = [Calls(store, client, limit) for limit in LIMITS]
    for calls in limits:
        calls.run()
        calls.found.clear()
    for turn in range(times):
        first = turn % len(limits)
        for calls in (*limits[first:], *limits[:first]):
            calls.run()
    return limits


def rows(limits: Sequence[Calls]) -> list[list[str]]:
    """Return a row for each kind of call and limit, compared with the first limit."""
    shown = []
    for kind in limits[0].found:
        one = _medians(limits[0], kind)
        for calls in limits:
            took, server, scripts = _medians(calls, kind)
            shown.append(
                [f"{kind}, N={calls.limit}", f"{scripts:.0f}", f"{server:.0f}", f"{server / one[1]:.1f}", f"{took:.0f}"]
            )
    return shown


def _medians(calls: Calls, kind: str) -> tuple[float, float, float]:
    took, server, scripts = zip(*calls.found[kind], strict=True)
    return median(took), median(server), median(scripts)


def _check(as_expected: object, kind: str) -> None:
    if not as_expected:
        raise AssertionError(f"{kind}: the call had another outcome")


def main() -> int:
    """Print the table; return 1 if a call at the highest limit takes the server too long."""
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "server") as server, server.client(2) as client:
        limits = measure(store_at(server.url(2), timeout=5), client)
    print(table(["one call", "scripts", "server's us", "by N=1", "client's us"], rows(limits)))
    slowest = max(_medians(limits[-1], kind)[1] for kind in limits[-1].found)
    target = Target(f"server's us of the slowest call, N={LIMITS[-1]}", slowest, MOST_MICROS)
    print(f"\n{target}")
    return 0 if target.reached else 1


if __name__ == "__main__":
    sys.exit(main())
