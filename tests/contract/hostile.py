"""A worker's main process, and the messages of a publisher that wants to end it.

As a script: receive so many random messages, as ``python -m tests.contract.hostile LOCK_URL MESSAGES EVERY SEED``.
A process of its own, because a worker changes Celery's state of its process for good.
"""

from __future__ import annotations

import logging
import pickle
import random
import sys
import warnings
from collections import Counter
from datetime import datetime, timezone
from typing import Any, Final

import kombu
from celery import Celery, bootsteps
from celery.app.task import Context
from celery.app.trace import setup_worker_optimizations
from celery.concurrency.solo import TaskPool
from celery.worker import state
from kombu.transport.memory import Channel
from kombu.utils import json

from celery_dlock import singleton_task
from celery_dlock.messaging.message import HEADER
from celery_dlock.messaging.tick_header import HEADER as TICK
from celery_dlock.options.lock_options import LockOptions
from celery_dlock.store.model import Identity
from celery_dlock.task.call_options import ENABLED, OPTIONS_HEADER

TASKS: Final = ("hostile.plain", "hostile.late", "hostile.queues", "hostile.claims", "hostile.ticks", "hostile.keyed")


def an_app(lock_url: str) -> Celery:
    app = Celery("hostile", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(dlock_url=lock_url, worker_hijack_root_logger=False, task_send_sent_event=True)

    def body(n: Any = None, *args: Any, **kwargs: Any) -> None: ...

    chosen: list[dict[str, Any]] = [
        {}, {"acks_late": True}, {"on_conflict": "queue"}, {"unique": "queued"}, {"once_per": "tick"}, {"key": "{n}"},
    ]  # fmt: skip
    for name, options in zip(TASKS, chosen, strict=True):
        singleton_task(app=app, name=name, **options)(body)
    app.finalize()
    return app


class _Pool(TaskPool):
    """Pickles each job as the pool of processes does, and runs every nth one in this thread."""

    every = 1
    jobs = 0

    def apply_async(self, target: Any, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        arguments = pickle.loads(pickle.dumps(args))
        self.jobs += 1
        return super().apply_async(target, arguments, kwargs, **options) if self.jobs % self.every == 0 else None


class _Channel(Channel):
    """Notes what becomes of a message."""

    ended: list[str]

    def basic_ack(self, delivery_tag: Any, multiple: bool = False) -> None:
        self.ended.append("acknowledged")

    def basic_reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        self.ended.append("requeued" if requeue else "rejected")


class MainProcess:
    """Celery's own consumer with its strategies and requests; only the connection is missing."""

    def __init__(self, app: Celery, every: int) -> None:
        self.app = app
        controller = app.WorkController(pool=_Pool, concurrency=1, hostname="hostile@test", task_events=True)
        self.consumer = consumer = controller.consumer
        self.pool = controller.pool
        self.pool.every = every
        consumer.timer = timer = _Timer()
        self._timer = timer
        consumer.qos = _Qos()
        consumer.blueprint.state = bootsteps.RUN
        consumer.update_strategies()
        connection = app.connection()
        self.channel = _Channel(connection.transport)
        self.channel.ended = []
        self._receiver = kombu.Consumer.__new__(kombu.Consumer)
        self._receiver.channel, self._receiver.accept = self.channel, {"application/json"}
        self._receiver.on_message = consumer.create_task_handler()
        self._receiver.on_decode_error = consumer.on_decode_error

    def receive(self, message: dict[str, Any]) -> list[str]:
        """Handle one message to its end. Return what the broker received then."""
        self.channel.ended = []
        wire = json.dumps(message)
        try:
            delivered = json.loads(wire)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            return ["unreadable"]  # by kombu itself, which knows no task yet
        self._receiver._receive_callback(delivered)
        self.consumer.perform_pending_operations()
        for call, arguments in self._timer.calls:
            call(*arguments)
        self._timer.calls = []
        self.consumer.perform_pending_operations()
        state.requests.clear()  # those that were only pickled never end
        return self.channel.ended


class _Timer:
    """The worker's timer, for which every ETA has come."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def call_at(self, eta: float, call: Any, args: Any = (), **_options: Any) -> None:
        float(eta)
        self.calls.append((call, args))

    call_after = call_at


class _Qos:
    value = 0

    def increment_eventually(self, *_: Any) -> None: ...

    decrement_eventually = increment_eventually


def main_process(lock_url: str, every: int = 1) -> MainProcess:
    """A main process whose pool runs every nth job, without a log."""
    for name in ("celery", "celery_dlock"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    app = an_app(lock_url)
    app.set_current()  # a pool looks for its tasks there
    setup_worker_optimizations(app, "hostile@test")  # as a worker's command does: its faster path catches less
    return MainProcess(app, every)


# -- messages


def nested(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind == "list" else {"a": value}
    return value


#: Values that break code which expects another type or size.
NASTY: Final[list[Any]] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**63, 2**64, 10**400, -(10**400), 0.0, 0.5, 1.5, -1.5, 1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "1", "-1", "nan", "task", "forever", "tick", "\x00",
    "a\x00b", "\ud800", "\udfff\ud800", "ä", "\u202e", "x" * 300, "x" * 20_000, "{", "{}", "{n}", "{n!r}",
    "{n:>999999999}",
    "{n.__class__}", "{n[0]}", "{{", "hostile.plain", "2030", "1999-01-01", "2030-01-01T00:00:00.123456789Z",
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "1999-01-01T00:00:00", "12:00", "2020-W01",
    [], [1], [[1]], [None], [None, None], [1, "x"], [-1, float("nan")], [10**400, 1], [0.1, 0.1, 0.1], ["x"], [{}],
    ["\ud800"],
    {}, {"a": 1}, {"": None}, {"task": "x"}, {"task": [], "options": {}},
    {"options": {"queue": 5}, "task": "hostile.plain"},
    {"__type__": "datetime", "__value__": "2030-01-01T00:00:00"}, {"__type__": "decimal", "__value__": "1e999999"},
    {"__type__": "uuid", "__value__": {"hex": "0" * 32, "version": 4}}, {"__type__": "uuid", "__value__": 5},
    {"__type__": "bytes", "__value__": "AAAA"}, {"__type__": [], "__value__": 1},
    nested(60, "list"), nested(240, "list"), nested(400, "dict"),
]  # fmt: skip

_PRESENT: Final = (
    "id", "task", "lang", "shadow", "root_id", "parent_id", "group", "group_index", "retries", "timelimit", "eta",
    "expires", "argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting", "stamped_headers",
    "stamps",
)  # fmt: skip
_OTHERS: Final = (
    *sorted(vars(Context)), "compression", "headers", "properties", "args", "kwargs", "groups", "redelivered", "dlock",
    "dlock_execution", "celery_beat_task", "priority", "taskset", "utc", "embed",
)  # fmt: skip
_OPTIONS: Final = (*LockOptions.names(), ENABLED, "unknown", "")
_EMBEDDED: Final = ("callbacks", "errbacks", "chain", "chord", "args", "retries", "id", "properties", "dlock_execution")
_WORDS: Final = (
    "skip", "retry", "raise", "wait", "queue", "shared", "drop_oldest", "queued", "running", "return",
    "run", "hold", "abort", "fail", "primary", "queued+running",
)  # fmt: skip


class Publisher:
    """Makes messages that are valid but for a few of their parts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0
        self.changed: Counter[str] = Counter()

    def valid(self) -> dict[str, Any]:
        self._count += 1
        task_id = f"id{self._count}"
        headers = dict.fromkeys(_PRESENT)
        headers |= {"lang": "py", "task": self._random.choice(TASKS), "id": task_id, "root_id": task_id, "retries": 0}
        headers |= {"timelimit": [None, None], "argsrepr": "()", "kwargsrepr": "{}", "ignore_result": False}
        headers |= {"replaced_task_nesting": 0, "stamps": {}, "stamped_headers": None, "origin": "1@here"}
        return {
            "body": json.dumps(
                [[self._count], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
            ),
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": headers,
            "properties": {
                "correlation_id": task_id,
                "reply_to": "reply",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": "celery"},
                "priority": 0,
                "delivery_tag": f"tag{self._count}",
            },
        }

    def hostile(self) -> dict[str, Any]:
        message = self.valid()
        for _ in range(self._random.choice((1, 1, 1, 2, 2, 3, 5))):
            way = self._random.choice(_WAYS)
            self.changed[way.__name__] += 1
            way(self, message)
        return message

    def value(self, depth: int = 0) -> Any:
        draw = self._random.random()
        if draw < 0.8 or depth > 3:
            return self._random.choice(NASTY)
        if draw < 0.9:
            return [self.value(depth + 1) for _ in range(self._random.randrange(4))]
        return {str(self.value(4))[:20]: self.value(depth + 1) for _ in range(self._random.randrange(4))}

    def header(self, message: dict[str, Any]) -> None:
        name = self._random.choice(_PRESENT if self._random.random() < 0.6 else _OTHERS)
        if name != "task":
            message["headers"][name] = self.value()

    def no_header(self, message: dict[str, Any]) -> None:
        name = self._random.choice(_PRESENT)
        if name != "task":
            message["headers"].pop(name, None)

    def ended(self, message: dict[str, Any]) -> None:
        """Expired: the main process itself stores its end."""
        message["headers"]["expires"] = "1999-01-01T00:00:00+00:00"

    def later(self, message: dict[str, Any]) -> None:
        message["headers"]["eta"] = datetime.now(timezone.utc).isoformat()

    def call(self, message: dict[str, Any]) -> None:
        draw = self._random.random()
        header: Any = {"task": message["headers"]["task"], "options": self._options()}
        if draw < 0.1:
            header = self.value()
        elif draw < 0.2:
            header[self._random.choice(("task", "options"))] = self.value()
        message["headers"][OPTIONS_HEADER] = header

    def _options(self) -> str:
        chosen = {}
        for _ in range(self._random.choice((1, 1, 2, 3))):
            word = self._random.random() < 0.3
            chosen[self._random.choice(_OPTIONS)] = self._random.choice(_WORDS) if word else self.value()
        return str(json.dumps(chosen))

    def copy(self, message: dict[str, Any]) -> None:
        """As if the library had published it."""
        headers = message["headers"]
        header = {
            "identity": Identity(f"id{self._count}").digest,
            "rank": 1,
            "conflict_retries": 1,
            "grant": "",
            "store_retries": 1,
        }
        header[self._random.choice((*header, "redelivered"))] = self.value()
        headers[HEADER] = header if self._random.random() < 0.9 else self.value()

    def tick(self, message: dict[str, Any]) -> None:
        header = {"task": message["headers"]["task"], "entry": "every minute", "due": 1.7e9}
        header[self._random.choice(tuple(header))] = self.value()
        message["headers"][TICK] = header if self._random.random() < 0.9 else self.value()

    def property(self, message: dict[str, Any]) -> None:
        name = self._random.choice(
            ("correlation_id", "reply_to", "delivery_mode", "priority", "expiration", "body_encoding", "dlock", "type")
        )
        if name != "body_encoding":  # kombu itself cannot read that
            message["properties"][name] = self.value()

    def origin(self, message: dict[str, Any]) -> None:
        info = message["properties"]["delivery_info"]
        info[self._random.choice(("exchange", "routing_key", "consumer_tag", "redelivered"))] = self.value()

    def arguments(self, message: dict[str, Any]) -> None:
        body = [[self.value()], {}, {}] if self._random.random() < 0.5 else [self.value(), self.value(), {}]
        message["body"] = json.dumps(body)

    def embedded(self, message: dict[str, Any]) -> None:
        embed = {self._random.choice(_EMBEDDED): self.value() for _ in range(2)}
        message["body"] = json.dumps([[self._count], {}, embed])
        if self._random.random() < 0.5:
            message["headers"]["group"] = "group"

    def body(self, message: dict[str, Any]) -> None:
        draw = self._random.random()
        if draw < 0.7:
            message["body"] = json.dumps(self.value())
        elif draw < 0.8:
            old = {"args": self.value(), "kwargs": self.value(), "id": self.value(), "retries": self.value()}
            message["body"] = json.dumps(old)
        else:
            whole = message["body"]
            message["body"] = whole[: self._random.randrange(len(whole) + 1)] + self._random.choice(
                ("", "[" * 5000, "9" * 5000)
            )

    def content(self, message: dict[str, Any]) -> None:
        name = self._random.choice(("content-type", "content-encoding"))
        message[name] = self._random.choice(
            ("application/json", "utf-8", "text/plain", "nothing", None, "", "binary", "utf-16")
        )


_WAYS: Final = (
    Publisher.header, Publisher.header, Publisher.header, Publisher.no_header, Publisher.ended, Publisher.later,
    Publisher.call, Publisher.call, Publisher.copy, Publisher.tick, Publisher.property, Publisher.origin,
    Publisher.arguments, Publisher.embedded, Publisher.body, Publisher.content,
)  # fmt: skip


#: Messages between two valid ones, which have to run.
BETWEEN: Final = 500


def receive_many(lock_url: str, messages: int, every: int, seed: int) -> None:
    """Receive random messages, and now and then a valid one.

    Raises:
        AssertionError: A message raised in the main process, which would have ended the worker, or a valid one did
            not run.
    """
    worker, publisher = main_process(lock_url, every), Publisher(seed)
    for number in range(messages):
        message = publisher.hostile()
        try:
            worker.receive(message)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: message {number} ended the worker: {str(message)[:3000]}") from error
        if number % BETWEEN == 0:
            _run_valid(worker, publisher.valid())


def _run_valid(worker: MainProcess, message: dict[str, Any]) -> None:
    every, worker.pool.every = worker.pool.every, 1
    told, task_id = worker.receive(message), message["headers"]["id"]
    worker.pool.every = every
    if told != ["acknowledged"] or worker.app.AsyncResult(task_id).state != "SUCCESS":
        raise AssertionError(f"a valid message did not run: {told}, {message}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    receive_many(sys.argv[1], *map(int, sys.argv[2:]))
