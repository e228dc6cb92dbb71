"""``debounce`` while store, broker and workers restart: bursts of ten calls for each name.

Each restart strikes twice: while the calls wait, and while the newest ones are granted, published and run.
"""

import json
from collections import Counter
from contextlib import ExitStack

import pytest

from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker
from tests.worker.queue.whereabouts import ENDS, describe

APP = "tests.support.apps.queueing"
#: Calls of a name in a burst: 1,040 calls in all, in four bursts of 20 names.
CALLS = 13
#: With the defaults, a lost message is delivered again after an hour. A call that lost its grant gets the next one
#: after two minutes. A worker has few messages at a time, so none waits in it for longer than the visibility timeout.
SETTINGS = {
    "dlock_ttl": 4,
    "dlock_grant_timeout": 3,
    "dlock_grant_attempts": 20,
    "worker_prefetch_multiplier": 5,
    "broker_transport_options": {
        "visibility_timeout": 6, "unacked_restore_interval": 0.5, "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,
    },
}  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.invariant("debounce-runs-the-newest-call")
@pytest.mark.parametrize(
    ("names", "restarts"),
    [
        pytest.param(5, ["kill_store"], id="short"),
        pytest.param(
            20, ["restart_store", "kill_worker", "restart_broker", "kill_store"], id="long", marks=pytest.mark.slow
        ),
    ],
)
def test_each_burst_runs_one_call_although_everything_restarts(tmp_path, names, restarts):
    with ExitStack() as stack:
        environment = Environment(tmp_path, stack, names)
        sent = {}
        for number, name in enumerate(restarts):
            restart, burst = getattr(environment, name), environment.send(number)
            sent |= burst
            # A call that its worker has not parked yet would be delivered again, and count as received then.
            environment.wait_until(
                lambda calls=burst: environment.settled(calls), f"burst {number} is not parked", burst
            )
            restart()
            environment.wait_until(
                lambda now=number: environment.due() and environment.began(now), f"burst {number}: none runs", burst
            )
            restart()
            environment.wait_until(
                lambda ids=burst: environment.due() and set(ids) <= environment.ended(ids),
                f"burst {number}: calls have no end after {name}", burst,
            )  # fmt: skip
        states = Counter(environment.states(sent).values())
        ran = {(body["n"], body["text"]) for body in environment.bodies()}
    bursts = len(restarts)
    assert len(sent) == names * CALLS * bursts
    assert states == {"SUCCESS": names * bursts, "REVOKED": names * (CALLS - 1) * bursts}
    # Two workers may receive calls in another order than that in which they were sent, so any of a burst may be newest.
    once = {(f"d{n}", str(burst)): 1 for n in range(names) for burst in range(bursts)}
    assert Counter((n, text.partition(".")[0]) for n, text in ran) == once


class Environment:
    """The servers, two workers, and what the test does to them.

    The calls are not due by themselves within the test: :meth:`due` makes them due, when a restart is over.
    """

    def __init__(self, folder, stack, names):
        self.folder, self.stack, self.names = folder, stack, range(names)
        self.broker = stack.enter_context(Server(folder / "broker", persistent=True))
        self.store = stack.enter_context(Server(folder / "store", persistent=True))
        # Not the broker's: a body that cannot write its note fails, and no restart is to cause that.
        self.results = stack.enter_context(Server(folder / "results"))
        self.urls = Urls(self.broker.url(), self.results.url(), self.store.lock_url())
        self.tasks = stack.enter_context(loaded_app(APP, self.urls))
        self.everyone = []
        self.workers = [self.start_worker() for _ in range(2)]

    def start_worker(self):
        environ = {"DLOCK_TEST_CONF": json.dumps(SETTINGS)}
        worker = running_worker(APP, folder=self.folder, urls=self.urls, environ=environ)
        self.everyone.append(self.stack.enter_context(worker))
        return self.everyone[-1]

    # -- restarts

    def restart_store(self):
        self.store.restart()

    def kill_store(self):
        self.store.kill()
        self.store.start()

    def restart_broker(self):
        self.broker.restart()

    def kill_worker(self):
        self.workers[0].kill()

    # -- calls

    def send(self, burst):
        """Send one burst of each name. Return name and text of each call, by task id."""
        calls = {}
        for n in self.names:
            for number in range(CALLS):
                text = f"{burst}.{number}"
                calls[self.tasks.saves_patiently.delay(f"d{n}", text=text).id] = (f"d{n}", text)
        return calls

    def wait_until(self, condition, message, calls):
        """Wait for a condition, and start a worker for each that has ended.

        Kombu may end a worker that has an unacknowledged message when its broker restarts.
        """

        def look():
            for place, worker in enumerate(self.workers):
                if not worker.running:
                    self.workers[place] = self.start_worker()
            return condition()

        try:
            eventually(look, 90, every=0.1, message=message)
        except AssertionError as late:
            told = describe(self.broker, self.store, self.results, list(calls), self.everyone)
            raise AssertionError(f"{late}\n{told}") from None

    def settled(self, calls):
        """Return whether one call of each name waits, and all others have their end."""
        left = set(calls) - self.ended(calls)
        one_each = Counter(calls[task_id][0] for task_id in left) == {f"d{n}": 1 for n in self.names}
        return one_each and left <= self.parked()

    def parked(self):
        with self.store.client() as client:
            keys = list(client.scan_iter("dlock:*:messages:*"))
            entries = [entry for key in keys for entry in client.hvals(key) if entry.startswith("[")]
        return {json.loads(entry.partition("\n")[0])[1] for entry in entries}

    def due(self):
        """Make all waiting calls due, as if their time had passed. Return True."""
        with self.store.client() as client:
            now = client.time()[0] * 1_000_000
            for key in client.scan_iter("dlock:*:delayed:*"):
                root, _, name = key.partition("delayed:")
                for identity in client.zrange(key, 0, -1):
                    client.zadd(key, {identity: now}, xx=True, lt=True)
                client.zadd(f"{root}queues", {name: now}, lt=True)
        return True

    def states(self, calls):
        with self.results.client() as client:
            found = client.mget([f"celery-task-meta-{task_id}" for task_id in calls])
        return {task_id: json.loads(meta)["status"] if meta else "" for task_id, meta in zip(calls, found, strict=True)}

    def ended(self, calls):
        return {task_id for task_id, state in self.states(calls).items() if state in ENDS}

    def bodies(self):
        with self.results.client() as client:
            noted = [json.loads(text) for text in client.lrange("history", 0, -1)]
        return [fact for fact in noted if fact["what"] == "in"]

    def began(self, burst):
        return any(body["text"].startswith(f"{burst}.") for body in self.bodies())
