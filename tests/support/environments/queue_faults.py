"""Servers, workers that are killed and made up for, and what the bodies of `tests.support.apps.queue_faults` noted."""

import itertools
import json
from contextlib import ExitStack, contextmanager

import redis

from tests.support.polling import eventually
from tests.support.workers import loaded_app, running_worker

APP = "tests.support.apps.queue_faults"
STEPS = {"DLOCK_TEST_STEPS": "1"}
accounts = (f"account-{number}" for number in itertools.count(1))


class RecordedRuns:
    """Reads what the bodies of `tests.support.apps.steps.recorded_post` recorded in `notes`."""

    def runs(self, account):
        return [json.loads(text) for text in self.notes.lrange(f"runs:{account}", 0, -1)]

    def numbers(self, account, what):
        return [number for word, number, _ in self.runs(account) if word == what]


class QueueFaultEnvironment(RecordedRuns):
    """Workers whose processes may be killed at a step, and what their bodies noted."""

    def __init__(self, folder, urls, tasks, notes, stack):
        self.folder, self.urls, self.tasks, self.notes = folder, urls, tasks, notes
        self.workers, self.began, self._stack = [], [], stack
        self._pids = {}

    def start(self):
        worker = self._stack.enter_context(
            running_worker(APP, folder=self.folder, urls=self.urls, concurrency=2, environ=STEPS)
        )
        self.workers.append(worker)
        self.began.append(worker)
        return worker

    def two_workers(self):
        """Make up for the dead."""
        self.workers = [worker for worker in self.workers if worker.running]
        while len(self.workers) < 2:
            self.start()
        self._pids = {worker: {worker.pid, *worker.children()} for worker in self.workers}

    def stop_workers(self):
        for worker in self.workers:
            worker.stop()
        self.workers = []

    def arm(self, step, whom):
        self.notes.set(f"kill:{step}", whom)

    def dead(self, step):
        """Return the pids of the processes that died at this step."""
        pid = self.notes.getdel(f"killed:{step}")
        assert pid is not None, f"nobody came by {step}"
        died = [worker for worker in self.workers if not worker.running]
        return {int(pid)}.union(*(self._pids[worker] for worker in died))

    def close_gate(self, account, number=1):
        self.notes.set(f"gate:{account}:{number}", 1)

    def open_gate(self, account, number=1):
        self.notes.delete(f"gate:{account}:{number}")

    def hold(self, task, account):
        """1 is in its body until its gate goes."""
        self.close_gate(account)
        result = task.delay(account, 1)
        eventually(lambda: self.numbers(account, "in")[:1] == [1], 20)
        return result

    @contextmanager
    def only_another_than_the_holder_receives(self, account):
        (pid,) = {pid for word, _, pid in self.runs(account) if word == "in"}
        (holder,) = [worker for worker in self.workers if pid in worker.children()]
        control = self.tasks.app.control
        assert control.cancel_consumer("celery", destination=[holder.node], reply=True, timeout=5)
        yield
        assert control.add_consumer("celery", destination=[holder.node], reply=True, timeout=5)

    def count(self, task, account):
        return task.waiting(account, 0).count

    def park(self, task, account, *numbers):
        before = self.count(task, account)
        results = []
        for place, number in enumerate(numbers, before + 1):
            results.append(task.delay(account, number))
            eventually(lambda count=place: self.count(task, account) == count, 20, message=f"{number} does not wait")
        return results

    def wait_until_drained(self, task, account):
        eventually(lambda: self.count(task, account) == 0, 20)
        eventually(lambda: not task.lock_for(account, 0).locked(), 20)

    def overlaps(self, account, dead=frozenset()):
        """Bodies that were entered while another one was in its body and alive."""
        inside, found = None, []
        for word, number, pid in self.runs(account):
            if word == "in":
                if inside is not None and inside[1] not in dead:
                    found.append((inside[0], number))
                inside = number, pid
            elif inside == (number, pid):
                inside = None
        return found


@contextmanager
def queue_fault_environment(folder, urls):
    with ExitStack() as stack:
        tasks = stack.enter_context(loaded_app(APP, urls))
        notes = stack.enter_context(redis.Redis.from_url(urls.result))
        yield QueueFaultEnvironment(folder, urls, tasks, notes, stack)
