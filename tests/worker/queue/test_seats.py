"""``limit`` with ``on_conflict="queue"``: kills, and a rollout from three seats to five and back."""

import json
import time
from collections import Counter

import pytest
import redis

from celery_dlock.store.redis.keys import LockKeys
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker
from tests.worker.queue.queue_run import measure

APP = "tests.support.apps.seats_e2e"


@pytest.mark.invariant("grants-survive-deaths", "seats-are-locks", "seats-share-a-queue")
@pytest.mark.parametrize(
    ("messages", "names", "kills"), [(200, 3, 2), pytest.param(2000, 20, 10, marks=pytest.mark.slow)]
)
def test_kills_leave_one_body_in_each_seat_and_lose_no_waiting_call(messages, names, kills):
    found = measure(messages=messages, names=names, kills=kills, workers=3, seed=1, app=APP, task="queues")
    assert found.ran + found.never_noted == found.messages, found
    assert (found.overlaps, found.twice_alive) == (0, 0), found
    assert found.children_killed + found.workers_killed == kills, found
    assert found.accounts <= {f"{name}/{seat}" for name in range(names) for seat in range(3)}


def most_at_once(noted):
    """Return the highest number of bodies that ran at once."""
    inside = most = 0
    for word, *_ in noted:
        inside += 1 if word == "in" else -1
        most = max(most, inside)
    return most


class Rollout:
    """Workers with different limits, and the bodies that ran since the last look."""

    def __init__(self, folder, urls, module, notes):
        self.folder, self.urls, self.module, self.notes = folder, urls, module, notes
        self.sent = self.seen = 0

    def worker(self, limit):
        environ = {"DLOCK_TEST_LIMIT": str(limit), "DLOCK_TEST_BODY": "0.1"}
        folder = self.folder / f"{limit}-{time.monotonic_ns()}"
        return running_worker(APP, folder=folder, urls=self.urls, concurrency=6, environ=environ)

    def run(self, messages):
        """Send so many calls of one name. Return what their bodies noted when all have ended."""
        for number in range(self.sent, self.sent + messages):
            self.module.queues.delay(1, number)
        self.sent += messages
        eventually(lambda: self.notes.scard("e2e:done") == self.sent, 60, message="not all calls ran")
        noted = [json.loads(text) for text in self.notes.lrange("e2e", self.seen, -1)]
        self.seen += len(noted)
        return noted


@pytest.mark.invariant("largest-limit-counts", "seats-share-a-queue")
def test_rollout_from_three_seats_to_five_and_back_loses_no_call(tmp_path):
    with Server(tmp_path / "server") as server:
        urls = Urls(server.url(0), server.url(1), server.lock_url(2))
        with (
            loaded_app(APP, urls) as module,
            redis.Redis.from_url(urls.result) as notes,
            server.client(2) as locks,
        ):
            rollout = Rollout(tmp_path, urls, module, notes)
            with rollout.worker(3), rollout.worker(3):
                assert most_at_once(rollout.run(60)) == 3
            with rollout.worker(3):
                with rollout.worker(5):
                    both = rollout.run(120)
                    assert most_at_once(both) == 5
                    # Also the worker with the smaller limit uses the seats of the larger one.
                    of_seats = Counter(place.partition("/")[2] for word, place, *_ in both if word == "in")
                    assert set(of_seats) == {"0", "1", "2", "3", "4"}
                forget_larger_limit(locks, module)
                assert most_at_once(rollout.run(60)) == 3


def forget_larger_limit(locks, module):
    """Let the minute pass after which the larger limit does not count any more."""
    record = LockKeys.of("dlock", module.queues.lock_spec.name_of((1, 0), {})).named("seats")
    limit, seen, places = locks.get(record).split()
    locks.set(record, f"{limit} {int(seen) - 61} {places}")
