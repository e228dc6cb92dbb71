"""A server, a worker of `tests.support.apps.policies`, and what its bodies noted: shared by the tests of one module."""

import itertools
import json
import re
import time
from contextlib import ExitStack, contextmanager

from tests.support import lock_records
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.policies"


class PolicyEnvironment:
    """The module's worker, as a test uses it.

    Broker, results and locks are databases 0, 1 and 2 of one server of our own.
    """

    def __init__(self, server, urls, tasks, folder):
        self.server = server
        self.urls = urls
        self.tasks = tasks
        self.app = tasks.app
        self.folder = folder
        self.workers = []
        self.client = server.client(1)
        self.broker = server.client(0)
        self.locks = server.client(2)
        self._numbers = itertools.count(1)

    @property
    def worker(self):
        return self.workers[0]

    def fresh(self):
        """A lock that no other test names."""
        return f"n{next(self._numbers)}"

    def history(self, **wanted):
        """Return the notes of the bodies that have these values, oldest first."""
        facts = [json.loads(text) for text in self.client.lrange("history", 0, -1)]
        return [fact for fact in facts if all(fact.get(name) == value for name, value in wanted.items())]

    def entered(self, within=10.0, count=1, **wanted):
        """Wait until so many bodies entered; gives them."""
        return eventually(
            lambda: (found := self.history(what="in", **wanted))[count - 1 :] and found,
            within,
            message=f"{count} bodies of {wanted}",
        )

    def overlaps(self, n):
        """Return the highest number of bodies of lock `n` that ran at once."""
        inside = most = 0
        for fact in sorted(self.history(n=n), key=lambda fact: (fact["at"], fact["what"] == "in")):
            inside += {"in": 1, "out": -1}.get(fact["what"], 0)
            most = max(most, inside)
        return most

    def hold(self, task, n, **options):
        """Run `task` until the test lets it go; it is inside when this returns."""
        gate = f"{n}-{next(self._numbers)}"
        result = task.apply_async((n, gate), {"end": options.pop("end", "")}, **options)
        self.entered(id=result.id)
        return Holding(self, result, n, gate)

    def open(self, gate):
        """Let one body pass this gate."""
        self.client.rpush(f"gate:{gate}", "go")

    def state(self, task_id):
        """The stored state as it is now; an AsyncResult keeps the first end that it saw."""
        return self.app.AsyncResult(task_id).state

    def lock_keys(self, task, n):
        """The Redis keys of this task's lock `n` as far as they exist now."""
        return [key for key in self.locks.keys("dlock*") if task.lock_name(n) in key]

    def lose_lock(self, task, n):
        """Remove this task's lock `n`, as a store does that loses its data."""
        name = task.lock_spec.name_of((n,), {})
        lock_records.forget(self.lock_server, lock_records.key(self.lock_server, name, 2), 2)

    def records(self):
        """Return the key of each record of the store that belongs to a lock."""
        return lock_records.records(self.lock_server, 2)

    def locked(self, task, n):
        return task.lock_for(n).locked()

    def free(self, task, n, within=5.0):
        """Wait until this task's lock `n` is free."""
        eventually(lambda: not self.locked(task, n), within, message=f"{n} is still held")

    def queued(self):
        """Messages that wait in any queue, and those handed out and not acknowledged."""
        waiting = sum(self.broker.llen(key) for key in self.broker.keys("*") if self.broker.type(key) == "list")
        return waiting + self.broker.hlen("unacked")

    def wait_until_drained(self, within=15.0):
        """Wait until the broker has no message left."""
        eventually(lambda: not self.queued(), within, message="messages are left")

    def unacked(self, task_id, within=10.0):
        """The message of this task that a worker has and has not acknowledged, as the broker keeps it."""

        def find():
            kept = [json.loads(text)[0] for text in self.broker.hvals("unacked")]
            return next((message for message in kept if message["headers"]["id"] == task_id), None)

        return eventually(find, within, message=f"{task_id} is not unacknowledged")

    def deliver_again(self, message, *, flagged=True):
        """Deliver a message again, as kombu does after its visibility timeout; unflagged, it is a plain second copy."""
        info = message["properties"]["delivery_info"]
        if flagged:
            message = {**message, "headers": {**message["headers"], "redelivered": True}}
            message["properties"] = {**message["properties"], "delivery_info": {**info, "redelivered": True}}
            tag = message["properties"]["delivery_tag"]
            self.broker.hdel("unacked", tag)
            self.broker.zrem("unacked_index", tag)
        self.broker.lpush(info["routing_key"], json.dumps(message))

    def lines(self, task_id, pattern=""):
        """Log lines of every worker about one task."""
        text = "\n".join(worker.log() for worker in self.workers)
        return [line for line in text.splitlines() if task_id in line and re.search(pattern, line)]

    def wait_for_line(self, task_id, pattern, within=10.0):
        return eventually(
            lambda: self.lines(task_id, pattern), within, message=f"{pattern!r} of {task_id} in the logs"
        )[0]


class Holding:
    """A body that waits at its gate."""

    def __init__(self, environment, result, n, gate):
        self.environment = environment
        self.n = n
        self.result = result
        self.id = result.id
        self.gate = gate

    def let_go(self):
        self.environment.open(self.gate)

    def end(self, timeout=15):
        """Let it go and give its result."""
        self.let_go()
        return self.result.get(timeout=timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


def _stop_listening(app):
    """Results that outlive the server would take leave of it, one by one, whenever they are collected."""
    listener = app.backend.result_consumer
    listener.stop()
    listener._pubsub = None


@contextmanager
def running_environment(folder, *args, app=APP, workers=1, pool="prefork", concurrency=4, conf=None, separate=False):
    """An environment with ready workers.

    Args:
        args: further arguments of `celery worker`.
        app: the module of another app that notes as this one does.
        conf: more app settings, for the workers and for this process.
        separate: broker and locks on servers of their own: `environment.broker_server`, `environment.lock_server`.
    """
    environ = {"DLOCK_TEST_CONF": json.dumps(conf or {})}
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "server"))
        broker = stack.enter_context(Server(folder / "broker")) if separate else server
        lock = stack.enter_context(Server(folder / "locks", persistent=True)) if separate else server
        urls = Urls(broker.url(0), server.url(1), lock.lock_url(2))
        tasks = stack.enter_context(loaded_app(app, urls))
        tasks.app.conf.update(conf or {})
        stack.callback(_stop_listening, tasks.app)
        environment = PolicyEnvironment(server, urls, tasks, folder)
        environment.broker_server, environment.lock_server = broker, lock
        environment.broker, environment.locks = broker.client(0), lock.client(2)
        for _ in range(workers):
            environment.workers.append(
                stack.enter_context(
                    running_worker(
                        app, *args, folder=folder, urls=urls, pool=pool, concurrency=concurrency, environ=environ
                    )
                )
            )
        yield environment


def timed(call):
    """Seconds that `call` took, and what it raised or gave."""
    start = time.monotonic()
    try:
        outcome = call()
    except Exception as error:  # noqa: BLE001 - the error is what the test looks at
        outcome = error
    return time.monotonic() - start, outcome
