"""``on_conflict="replace"`` under a flood, while children and workers die: the newest call runs to its end, alone."""

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress

import pytest
from celery import chain

from tests.support.environments.queueing import QueueEnvironment
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

pytestmark = pytest.mark.invariant("newest-call-stops-the-running-one")

APP = "tests.support.apps.replacing"
#: A message of a killed worker is delivered again after these seconds.
RESTORING = {"visibility_timeout": 8, "unacked_restore_interval": 0.5, "unacked_mutex_expire": 1}
#: A killed worker may have taken a granted message from Redis without a record of it. That message is lost. Its call is
#: granted again after twice this time, which is two minutes by default.
GRANT_TIMEOUT = 20
CONF = json.dumps({"broker_transport_options": RESTORING, "dlock_grant_timeout": GRANT_TIMEOUT})


class Flood:
    """Calls of one name, each with a next step of its chain, and what became of them."""

    def __init__(self, folder, stack, pool, task, how):
        self.folder, self.stack, self.pool = folder, stack, pool
        self.server = stack.enter_context(Server(folder / "server"))
        self.urls = Urls(self.server.url(0), self.server.url(1), self.server.lock_url(2))
        self.tasks = stack.enter_context(loaded_app(APP, self.urls))
        self.environment = QueueEnvironment(self.server, self.urls, self.tasks, folder)
        self.task, self.how = getattr(self.tasks, task), how
        self.random = random.Random(1)
        self.dead = set()
        self.sent = []
        for _ in range(2):
            self.environment.workers.append(self.start())

    def start(self):
        return self.stack.enter_context(
            running_worker(
                APP, folder=self.folder, urls=self.urls, pool=self.pool, concurrency=3,
                environ={"DLOCK_TEST_CONF": CONF},
            )
        )  # fmt: skip

    def call(self, seconds):
        self.sent.append(chain(self.task.si("flood", seconds, self.how), self.tasks.plain.si("next")).apply_async())

    def kill_child(self):
        inside = [note for note in self.environment.history(what="in") if note["pid"] not in self.dead]
        if inside and self.pool == "prefork":
            with suppress(ProcessLookupError):
                os.kill(inside[-1]["pid"], signal.SIGKILL)
                self.dead.add(inside[-1]["pid"])

    def restart_worker(self, *, kill):
        place = self.random.randrange(2)
        worker = self.environment.workers[place]
        if kill:
            self.dead.update([worker.pid, *worker.children()])
            worker.kill()
        else:
            worker.stop()
        self.environment.workers[place] = self.start()

    def ends(self):
        """The state and the error text of each call that has its end, by task id."""
        found = {}
        for result in self.sent:
            meta = self.tasks.app.backend.get_task_meta(result.parent.id, cache=False)
            if meta["status"] in ("SUCCESS", "REVOKED", "FAILURE"):
                found[result.parent.id] = (meta["status"], str(meta["result"]))
        return found

    def overlaps(self):
        """Pairs of bodies that were inside at once, of which the process of neither was killed."""
        notes = sorted(self.environment.history(n="flood"), key=lambda note: note["at"])
        inside, found = {}, []
        for note in notes:
            key = (note["id"], note["pid"])
            if note["what"] == "in":
                found += [(other, key) for other in inside if other[1] not in self.dead and self.beats(other, note)]
                inside[key] = note
            elif note["what"] == "out":
                inside.pop(key, None)
        return found

    def beats(self, other, note):
        """Whether the body of ``other`` has shown that it lives after this note. A killed body leaves no note."""
        return float(self.environment.client.get(f"beat:{other[0]}") or 0) >= note["at"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("calls", "pause", "seconds", "pool", "task", "how"),
    [
        (12, 0.3, 2, "prefork", "brief", ""),
        *(
            pytest.param(50, 0.4, 5, pool, "brief", "", marks=pytest.mark.slow)
            for pool in ("prefork", "threads", "gevent")
        ),
        pytest.param(50, 0.4, 5, "prefork", "killed", "stubborn", marks=pytest.mark.slow),
    ],
)
def test_newest_call_of_a_flood_ends_and_each_other_one_is_replaced(tmp_path, calls, pause, seconds, pool, task, how):
    with ExitStack() as stack:
        flood = Flood(tmp_path, stack, pool, task, how)
        for number in range(calls - 1):
            flood.call(seconds)
            time.sleep(pause)
            if number % 12 == 5:
                flood.kill_child()
            if number in (calls // 3, 2 * calls // 3) and calls > 12:
                flood.restart_worker(kill=number > calls // 2)
        # A message that a killed worker had taken counts as received when it is delivered again. Send the last call
        # after that, so that it is the newest one.
        eventually(lambda: len(flood.ends()) >= calls - 2, 60, message="calls have no end")
        flood.call(seconds)
        last = flood.sent[-1].parent.id
        eventually(lambda: len(flood.ends()) == calls, 90, message="calls have no end")
        ends = flood.ends()
        assert ends[last][0] == "SUCCESS"
        assert not flood.overlaps()
        check_ends(ends, {note["id"] for note in flood.environment.history(what="returned")})
        for result in flood.sent:
            state = ends[result.parent.id][0]
            eventually(
                lambda one=result, end=state: flood.environment.state(one.id) == end, 20, message="a canvas hangs"
            )
        eventually(lambda: not flood.environment.waiters(flood.task, "flood"), message="calls still wait")
        flood.environment.free(flood.task, "flood")


def check_ends(ends, returned):
    """Each call returned, or names another call that replaced it. All but three at most were replaced."""
    for task_id, (state, text) in ends.items():
        if state == "REVOKED":
            _, _, by = text.partition("replaced by ")
            assert by in ends.keys() - {task_id}, text
        else:
            assert (state, task_id in returned) == ("SUCCESS", True)
    assert Counter(state for state, _ in ends.values())["REVOKED"] >= len(ends) - 3
