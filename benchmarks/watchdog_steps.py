"""Interpreter steps of the watchdog for held leases, counted: `python -m benchmarks.watchdog_steps`.

A store without a server answers each renewal, and time passes only between rounds. So two runs print the same steps.
"""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.locking.lease_source import LocalLeaseSource
from celery_dlock.locking.lease_table import LocalLeaseTable
from celery_dlock.locking.watchdog import ROUND, Watchdog, WatchdogHooks
from celery_dlock.store.redis.store import RedisStore

TTL = 9.0
#: Rounds whose steps are counted: one ttl's third. Rounds whose garbage collections are counted: 45 s.
ROUNDS, GC_ROUNDS = 15, 225


class _Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class _Server:
    """A topology and its only connection: each renewal is confirmed."""

    clustered = False
    timeout = 0.4

    def each(
        self, pipeline: Any, calls: Sequence[Any], within: float | None = None, *, awaits_moves: bool = True
    ) -> list[Any]:
        commands = [command for _, command in calls]
        pipeline.send(self, commands)
        answers: list[Any] = pipeline.read(self, commands)
        return answers

    def send(self, commands: bytes) -> None:
        pass

    def read_all(self, count: int) -> list[int]:
        return [1] * count


def count_steps(leases: int) -> tuple[collections.Counter[str], list[int]]:
    """Return the steps of some rounds by function, and the garbage collections of many rounds by generation."""
    clock, table, server = _Clock(), LocalLeaseTable(), _Server()
    store = RedisStore(server, "dlock")  # type: ignore[arg-type]
    watchdog = Watchdog({0.4: store}, clock, WatchdogHooks())
    watchdog._loop.running.acquire(blocking=False)  # noqa: SLF001  # so no thread starts
    watchdog.watch(LocalLeaseSource(table, lambda record, released: None))
    for number in range(leases):
        record = table.open(shared_name(f"held:{number}"), f"owner.{number}", TTL)
        record.held(clock.now + TTL)
        if number % max(1, leases // ROUNDS) == 0:
            _run(watchdog, clock, 1)
    _run(watchdog, clock, 3 * ROUNDS)
    before = _collections()
    _run(watchdog, clock, GC_ROUNDS)
    collected = [after - earlier for after, earlier in zip(_collections(), before, strict=True)]
    steps: collections.Counter[str] = collections.Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            steps[f"{frame.f_code.co_name} of {Path(frame.f_code.co_filename).name}"] += 1
        return trace

    sys.settrace(trace)
    _run(watchdog, clock, ROUNDS)
    sys.settrace(None)
    return steps, collected


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def _run(watchdog: Watchdog, clock: _Clock, rounds: int) -> None:
    for _ in range(rounds):
        watchdog.run_round()
        clock.now += ROUND


def main() -> None:
    for leases in (1_000, 10_000):
        steps, collected = count_steps(leases)
        total = sum(steps.values()) / ROUNDS
        renewal = total / ROUND / (leases * 3 / TTL)
        print(f"{leases} leases: {total:.0f} steps a round, {renewal:.0f} a renewal;", end=" ")
        print(f"garbage collections in {GC_ROUNDS * ROUND:.0f} s, young to old:", *collected)
        for name, count in steps.most_common(8):
            print(f"  {count / ROUNDS:8.0f} {name}")


if __name__ == "__main__":
    main()
