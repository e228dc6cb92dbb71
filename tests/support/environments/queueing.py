"""A server, a worker of `tests.support.apps.queueing`, and what its bodies noted: shared by the tests of one module."""

import json
from contextlib import ExitStack, contextmanager

import redis

from celery_dlock.store.redis.keys import LockKeys
from tests.support import lock_records
from tests.support.environments.policies import PolicyEnvironment, _stop_listening
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.queueing"


class QueueEnvironment(PolicyEnvironment):
    """The module's worker, as a test of the queue policy uses it."""

    def hold(self, task, n, **options):
        holding = super().hold(task, n, **options)
        self.holdings.append(holding)
        return holding

    def let_all_go(self):
        """A test that failed leaves no slot occupied to the next one."""
        while self.holdings:
            self.holdings.pop().let_go()

    def keys(self, task, n):
        return LockKeys.of("dlock", name_of(task, n))

    def remains(self, task, n):
        """Return what the store keeps of the lock and its queue."""
        keys = self.keys(task, n)
        of_ours = {
            keys.lock,
            *keys.queue()[:3],
            keys.named("dead"),
            lock_records.key(self.lock_server, name_of(task, n), 2),
        }
        return sorted(of_ours.intersection(self.records()))

    def dead_letters(self, task, n):
        """Return the number of dead letters of the lock."""
        return lock_records.dead_letters(self.lock_server, name_of(task, n), 2)

    def waiters(self, task, n):
        """Return the ids of the calls that wait for the lock, by rank."""
        return [waiter.task_id for waiter in task.waiting(n).waiters]

    def parked(self, task, n, *results, within=10.0):
        """Wait until exactly these wait, in this order."""
        ids = [result.id for result in results]
        eventually(
            lambda: self.waiters(task, n) == ids,
            within,
            message=f"{ids} do not wait for {n}, but {self.waiters(task, n)}",
        )

    def park(self, task, n, count=1, *args, **options):
        """Send so many calls of a lock that is held, one after the other; they wait when this returns."""
        before = task.waiting(n).count
        results = [task.apply_async((n, *args), **options) for _ in range(count)]
        eventually(lambda: task.waiting(n).count == before + count, message=f"{count} do not wait for {n}")
        return results

    def order(self, n, what="in"):
        """Return the calls whose bodies entered lock `n`, in this order."""
        return [fact["id"] for fact in self.history(n=n, what=what)]

    def handed_over(self, first, second):
        """Seconds from the first end of one body to the entrance of the next."""
        entered = self.entered(id=second)[0]
        return entered["at"] - self.history(what="out", id=first)[0]["at"]

    def lying(self, queue):
        """The messages in a broker's queue, whatever their priority."""
        keys = [key for key in self.broker.keys(f"{queue}*") if self.broker.type(key) == "list"]
        return [json.loads(text) for key in keys for text in self.broker.lrange(key, 0, -1)]

    def listens(self):
        """Wait until a worker hears its remote control, which comes a little later than "ready"."""
        eventually(self._pong, 15)

    def _pong(self):
        try:
            return self.app.control.ping(timeout=1, limit=1)
        except redis.ConnectionError:  # an old connection of the pool; the next try has a new one
            return None

    def consume(self, queue):
        """Let the worker read this queue too."""
        self.app.control.add_consumer(queue, reply=True, timeout=5, limit=1)

    def ignore(self, queue):
        """Let no worker read this queue any more."""
        self.app.control.cancel_consumer(queue, reply=True, timeout=5, limit=1)

    def unacknowledged(self, task_id):
        """Has a worker this message, and not acknowledged it?"""
        kept = [json.loads(text)[0] for text in self.broker.hvals("unacked")]
        return any(message["headers"].get("id") == task_id for message in kept)


def name_of(task, n):
    """Return the name of the task's lock `n`."""
    return task.lock_spec.name_of((n,), {})


@contextmanager
def running_environment(folder, *args, app=APP, workers=1, pool="prefork", concurrency=4, conf=None, separate=False):
    """An environment with ready workers.

    Args:
        args: further arguments of `celery worker`.
        app: the module of another app that notes as this one does.
        conf: more app settings, for the workers and for this process.
        separate: locks on a server of their own, which keeps an append-only file: `environment.lock_server`.
    """
    environ = {"DLOCK_TEST_CONF": json.dumps(conf or {})}
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "server"))
        lock = stack.enter_context(Server(folder / "locks", persistent=True)) if separate else server
        urls = Urls(server.url(0), server.url(1), lock.lock_url(2))
        tasks = stack.enter_context(loaded_app(app, urls))
        tasks.app.conf.update(conf or {})
        if "result_backend" not in (conf or {}):
            stack.callback(_stop_listening, tasks.app)
        environment = QueueEnvironment(server, urls, tasks, folder)
        environment.holdings = []
        environment.lock_server, environment.locks = lock, lock.client(2)
        for _ in range(workers):
            started = running_worker(
                app, *args, folder=folder, urls=urls, pool=pool, concurrency=concurrency, environ=environ
            )
            environment.workers.append(stack.enter_context(started))
            environment.listens()
        yield environment
