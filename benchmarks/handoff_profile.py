"""Profile of the time between two bodies, by stamps of each step: `handoff.py --only profile`."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from celery.backends.base import Backend
from celery.concurrency.base import BasePool
from celery.signals import task_prerun
from celery.worker.request import Request
from kombu import Producer
from kombu.transport.redis import Channel

from benchmarks.tables import table
from celery_dlock.messaging import handoff
from celery_dlock.messaging.parked import ParkedMessage
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.task.execution import Execution

if TYPE_CHECKING:
    from benchmarks.handoff_environment import Event
    from benchmarks.handoff_rounds import Rounds

__all__ = ["measure", "stamp_steps"]


def stamp_steps(note: Callable[[str, str, int], None]) -> None:
    """Have each step of this process write its start (``step>``) and its end (``>step``) to the diary."""

    def stamp(owner: Any, method: str, step: str) -> None:
        called = getattr(owner, method)

        @functools.wraps(called)
        def stamping(*args: Any, **kwargs: Any) -> Any:
            note(f"{step}>", "-", 0)
            try:
                return called(*args, **kwargs)
            finally:
                note(f">{step}", "-", 0)

        setattr(owner, method, stamping)

    stamp(Backend, "mark_as_done", "result")
    stamp(RedisStore, "release", "release")
    stamp(ParkedMessage, "read", "read-parked")
    stamp(handoff, "publish_parked", "hand-off")
    stamp(Producer, "publish", "publish")
    stamp(RedisStore, "confirm_publish", "confirm")
    stamp(Channel, "_brpop_read", "brpop")
    stamp(Request, "__init__", "received")
    stamp(Request, "on_success", "success")
    stamp(BasePool, "apply_async", "pool")
    # The first observable step of the tracer in the child.
    task_prerun.connect(lambda **_: note("prerun", "-", 0), weak=False)
    stamp(Execution, "begin", "begin")
    stamp(RedisStore, "acquire", "acquire")


def measure(rounds: Rounds, times: int) -> str:
    """Return two tables of each step's start and end: after a body's end, and after a plain task's publication."""
    parts = []
    for shown, sample in (
        ("a plain task, from its publication", rounds.profiled_floor),
        ("a hand-off", rounds.profiled),
    ):
        steps: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(times):
            seen: Counter[str] = Counter()
            events: list[Event] = sample()
            for event in events:
                seen[event.what] += 1
                steps[event.what, seen[event.what]].append((event.at - events[0].at) * 1e3)
        often = {step: at for step, at in steps.items() if len(at) > times / 2}
        rows = [
            [what, f"{median(at):.2f}"] for (what, _), at in sorted(often.items(), key=lambda step: median(step[1]))
        ]
        parts.append(f"{shown}, {times} times\n\n{table(['step> begins, >step ends', 'ms'], rows)}")
    return "\n\n".join(parts)
