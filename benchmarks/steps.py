"""Steps of the interpreter that a task takes in its pool child: `python benchmarks/steps.py`, a few seconds.

No clock and so no noise: what `sys.settrace` counts is the same in every run of one version of Python.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from celery.app.trace import build_tracer

from benchmarks.tables import table
from celery_dlock.locking.shared_lease_table import SharedLeaseTable
from celery_dlock.messaging.message import PROPERTY, Delivery, RawMessage
from celery_dlock.runtime import Runtime
from tests.support.servers import Server

KINDS = ("plain", "singleton", "locked")
#: Runs before the one that is counted: caches are filled, scripts loaded.
WARM = 20


class Child:
    """This process, as a pool child of a worker is set up: its slots lie in memory shared with a main process."""

    def __init__(self, server: Server) -> None:
        os.environ["DLOCK_BENCH_SERVER"] = server.url().rpartition("/")[0]
        from benchmarks.app import app  # noqa: PLC0415 (it reads the server's address when it is imported)

        slots = SharedLeaseTable()
        slots.adopt()
        Runtime.of(app).adopt(slots)
        self._tracers: dict[str, Callable[..., Any]] = {}
        for kind in KINDS:
            task = app.tasks[f"benchmarks.app.{kind}"]
            task.__trace__ = build_tracer(task.name, task, app=app)
            self._tracers[kind] = task.__trace__

    def steps(self, kind: str) -> Counter[str]:
        """How many steps one run takes, by function."""
        for _ in range(WARM):
            self._run(kind)
        counted: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: Any) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                code = frame.f_code
                counted[f"{Path(code.co_filename).name}:{code.co_name}"] += 1
            return count

        sys.settrace(count)
        try:
            self._run(kind)
        finally:
            sys.settrace(None)
        return counted

    def _run(self, kind: str) -> None:
        task_id, now = str(uuid.uuid4()), time.monotonic()
        request: dict[str, Any] = {"id": task_id, "delivery_info": {}, "hostname": "bench@localhost", "properties": {}}
        if kind == "singleton":
            # What the main process adds for a task of ours.
            raw = RawMessage(b"", "application/json", "utf-8", {}, {}, "celery")
            delivery = Delivery(uuid.uuid4().hex, now, now, monitored=False, rank_us=None, conflict_retries=0, raw=raw)
            request["properties"] = {PROPERTY: tuple(delivery)}
            request["headers"] = {}
        state = self._tracers[kind](task_id, (uuid.uuid4().int,), {}, request)
        if state.info is not None:
            raise AssertionError(f"{kind}: {state}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="dlock-bench-") as name, Server(Path(name) / "server") as server:
        child = Child(server)
        counted = {kind: child.steps(kind) for kind in KINDS}
    plain = counted["plain"].total()
    rows = [[kind, f"{steps.total()}", f"{steps.total() - plain:+}"] for kind, steps in counted.items()]
    print(table(["task", "steps", "by plain"], rows), "\n")
    most = (counted["singleton"] - counted["plain"]).most_common(20)
    print(table(["where a singleton task takes more", "steps"], [[place, str(count)] for place, count in most]))


if __name__ == "__main__":
    main()
