"""Steps of the interpreter that a task takes in a worker: `python benchmarks/steps.py`, a few seconds.

Two parts are counted. In the pool child it is one run. In the main process it is one message: its receipt, until the
pool has it, and its start and end as the pool reports them.

No clock and so no noise: what `sys.settrace` counts is the same in every run of one version of Python.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

from celery.app.trace import build_tracer
from celery.worker import state
from kombu.transport.virtual import Message
from kombu.utils import json

from benchmarks.tables import table
from celery_dlock.keys import key_spec
from celery_dlock.locking.shared_lease_table import SharedLeaseTable
from celery_dlock.messaging.message import PROPERTY, Delivery, RawMessage
from celery_dlock.runtime import Runtime
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from tests.support.servers import Server

KINDS = ("plain", "singleton", "locked")
#: The kinds that differ for the main process: redis-py's lock does nothing there.
RECEIVED = ("plain", "singleton")
#: Runs before the one that is counted: caches are filled, scripts loaded.
WARM = 20


def count_steps(call: Callable[[], object]) -> Counter[str]:
    """Count the steps of one call, by function."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            code = frame.f_code
            counted[f"{Path(code.co_filename).name}:{code.co_name}"] += 1
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(None)
    return counted


class Child:
    """This process, set up as a pool child: its lease table is in memory shared with a main process."""

    def __init__(self, server: Server) -> None:
        os.environ["DLOCK_BENCH_SERVER"] = server.url().rpartition("/")[0]
        # It reads the server's address when it is imported. An earlier child of this process had another server.
        sys.modules.pop("benchmarks.app", None)
        app = importlib.import_module("benchmarks.app").app
        self._runtime = Runtime.of(app)
        self._adopt()
        self._tracers: dict[str, Callable[..., Any]] = {}
        for kind in KINDS:
            task = app.tasks[f"benchmarks.app.{kind}"]
            task.__trace__ = build_tracer(task.name, task, app=app)
            self._tracers[kind] = task.__trace__

    def _adopt(self) -> None:
        slots = SharedLeaseTable()
        slots.adopt()
        self._runtime.adopt(slots)

    def start_metrics(self) -> None:
        """Count for the metrics from now on."""
        self._runtime.counts.start(self._runtime.app.tasks)
        self._adopt()

    def steps(self, kind: str) -> Counter[str]:
        """Count the steps of one run, by function."""
        for _ in range(WARM):
            self._tracers[kind](*self._message(kind))
        tracer, message = self._tracers[kind], self._message(kind)
        ended = []
        counted = count_steps(lambda: ended.append(tracer(*message)))
        if ended[0].info is not None:
            raise AssertionError(f"{kind}: {ended[0]}")
        return counted

    def _message(self, kind: str) -> tuple[str, tuple[int], dict[str, Any], dict[str, Any]]:
        """Make what the pool child receives from the main process: task id, arguments and request."""
        task_id, now = str(uuid.uuid4()), time.monotonic()
        request: dict[str, Any] = {"id": task_id, "delivery_info": {}, "hostname": "bench@localhost", "properties": {}}
        if kind == "singleton":
            # The main process adds these properties to a singleton task's request.
            raw = RawMessage(b"", "application/json", "utf-8", {}, {}, "celery")
            delivery = Delivery(uuid.uuid4().hex, now, now, monitored=False, rank_us=None, conflict_retries=0, raw=raw)
            request["properties"] = {PROPERTY: tuple(delivery)}
            request["headers"] = {}
        return task_id, (uuid.uuid4().int,), {}, request


class MainProcess:
    """The main process of a worker, without a connection: Celery's strategy and request, and a pool that runs nothing.

    Args:
        kind: The kind of task that it receives.
    """

    def __init__(self, kind: str) -> None:
        from benchmarks.app import app  # noqa: PLC0415 (see `Child`)

        self._task = app.tasks[f"benchmarks.app.{kind}"]
        self._callbacks: dict[str, Callable[..., Any]] = {}
        pool = SimpleNamespace(apply_async=self._apply)
        consumer = SimpleNamespace(
            hostname="bench@localhost", connection_errors=(OSError,), event_dispatcher=None, pool=pool,
            timer=SimpleNamespace(call_at=None), apply_eta_task=None, disable_rate_limits=True, task_buckets={},
            controller=SimpleNamespace(state=state), _limit_task=None, _limit_post_eta=None,
            on_task_request=lambda request: request.execute_using_pool(pool),
        )  # fmt: skip
        self._handle = self._task.start_strategy(app, consumer)
        DeliveryRegistry.of(app).tags = lambda: {"celery": "tag"}

    def steps(self) -> tuple[Counter[str], Counter[str]]:
        """Count the steps from the receipt to the pool, and those of the start and the end that the pool reports."""
        for _ in range(WARM):
            self._receive(self._message())
            self._end()
        message = self._message()
        return count_steps(lambda: self._receive(message)), count_steps(self._end)

    def _apply(self, *_: Any, **callbacks: Any) -> object:
        self._callbacks = callbacks
        return self  # requests hold this by a weak reference

    def _receive(self, message: Message) -> None:
        self._handle(message, None, message.ack_log_error, message.reject_log_error, [])

    def _end(self) -> None:
        self._callbacks["accept_callback"](os.getpid(), time.time())
        self._callbacks["callback"]((False, None, 0.01))

    def _message(self) -> Message:
        """Make a message as Celery publishes it to a Redis broker."""
        task_id = str(uuid.uuid4())
        absent = ("shadow", "eta", "expires", "group", "group_index", "parent_id", "stamped_headers")
        headers: dict[str, Any] = {
            "lang": "py", "task": self._task.name, "id": task_id, "root_id": task_id, "origin": "bench@localhost",
            "argsrepr": "(1,)", "kwargsrepr": "{}", "retries": 0, "timelimit": [None, None], "ignore_result": False,
            "replaced_task_nesting": 0, "stamps": {}, **dict.fromkeys(absent),
        }  # fmt: skip
        properties = {
            "correlation_id": task_id, "reply_to": task_id, "delivery_mode": 2, "priority": 0,
            "delivery_info": {"exchange": "", "routing_key": "celery"}, "delivery_tag": task_id,
        }  # fmt: skip
        embed = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))
        body = {"body": json.dumps([[uuid.uuid4().int], {}, embed]), "headers": headers, "properties": properties}
        content = {"content-type": "application/json", "content-encoding": "utf-8"}
        channel: Any = _Channel()
        return Message({**body, **content}, channel=channel, accept={"application/json"})


class _Channel:
    """The channel of a message, which takes every acknowledgement."""

    closed = False
    connection = object()
    no_ack_consumers: frozenset[str] = frozenset()

    def basic_ack(self, _tag: str, **_options: object) -> None: ...

    def decode_body(self, body: str, _encoding: str | None) -> str:
        return body


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="dlock-bench-") as name,
        Server(Path(name) / "server") as server,
        # Counting makes the lock name so slow on a busy machine that it would be measured again, and reported.
        mock.patch.object(key_spec, "SLOW", math.inf),
    ):
        child = Child(server)
        counted = {kind: child.steps(kind) for kind in KINDS}
        child.start_metrics()
        metered = child.steps("singleton")
        received = {kind: MainProcess(kind).steps() for kind in RECEIVED}
    plain = counted["plain"].total()
    rows = [[kind, f"{steps.total()}", f"{steps.total() - plain:+}"] for kind, steps in counted.items()]
    rows.append(["singleton, metrics on", f"{metered.total()}", f"{metered.total() - plain:+}"])
    print("in the pool child:", table(["task", "steps", "more than plain"], rows), sep="\n", end="\n\n")
    totals = {kind: [steps.total() for steps in parts] for kind, parts in received.items()}
    rows = [[kind, *map(str, parts), f"{sum(parts) - sum(totals['plain']):+}"] for kind, parts in totals.items()]
    print("in the main process:", table(["task", "received", "ended", "more than plain"], rows), sep="\n", end="\n\n")
    most = {"pool child": counted["singleton"] - counted["plain"]}
    most["main process"] = sum(received["singleton"], Counter()) - sum(received["plain"], Counter())
    for process, places in most.items():
        rows = [[place, str(count)] for place, count in places.most_common(20)]
        print(table([f"where a singleton task takes more in the {process}", "steps"], rows), "\n")


if __name__ == "__main__":
    main()
