"""A native thread of the library shares no lock with the greenlets of its process."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.processes import ROOT

PREPARE = """
import sys
library, url = sys.argv[1:]
if library == "gevent":
    from gevent.monkey import patch_all; patch_all()
    from gevent import spawn
else:
    import eventlet; eventlet.monkey_patch()
    from eventlet import spawn
import json, logging, time
from celery import Celery
from celery_dlock import Lock, signals
from celery_dlock.utils import threads as native

me = native._original("_thread", "get_ident")
greenlets, seen = me(), []

class Handler(logging.Handler):
    def emit(self, record):
        seen.append([record.getMessage(), me() == greenlets])

handler = Handler()
logger = logging.getLogger("celery_dlock")
logger.addHandler(handler)
logger.setLevel("INFO")

def until(true):
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
"""

LOG = """
from celery_dlock.utils.log import logger as ours
held = []

def thread():
    try:
        1 / 0
    except ZeroDivisionError:
        ours.exception("an error")
    for number in range(3):
        ours.warning("of a thread: %d", number)
    held.append("gone on")

handler.acquire()  # as a greenlet that is writing a record, and waits for the terminal
native.start_daemon(thread)
until(lambda: held)
handler.release()
spawn(lambda: logger.warning("of a greenlet"))
until(lambda: len(seen) == 5)
print(json.dumps([held, seen]))
"""

LOSE = """
import redis
app = Celery("green", broker="memory://", set_as_current=False)
app.conf.dlock_url = url

@signals.lock_lost.connect
def lost(event, **_):
    seen.append(["receiver", me() == greenlets])

lock = Lock("mine", app=app, ttl=1)
lock.acquire()
handler.acquire()
with redis.Redis.from_url(url) as client:
    client.delete(*client.keys("dlock:*:lock:*"))
until(lambda: not lock.lease.held)
time.sleep(0.3)
handler.release()
until(lambda: len(seen) == 2)
print(json.dumps([lock.lease.held, seen]))
"""


WAIT = """
app = Celery("green", broker="memory://", set_as_current=False)
app.conf.dlock_url = url
done, ticks, inside, most = [], [], [0], [0]

def turn(number):
    with Lock("x", app=app):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        inside[0] -= 1
    done.append(number)

def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.01)

held = Lock("x", app=app)
held.acquire()
spawn(tick)
waiting = [spawn(turn, number) for number in range(130)]  # more than connections that may block
time.sleep(1.0)
for one in waiting[:3]:
    one.kill()
before = len(ticks)
time.sleep(0.5)
ticked = len(ticks) - before
began = time.monotonic()
held.release()
until(lambda: len(done) == 127)
print(json.dumps([sorted(done), most[0], ticked, time.monotonic() - began]))
"""


def run(library: str, program: str, url: str) -> Any:
    command = [sys.executable, "-W", "ignore", "-c", PREPARE + program, library, url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(params=["gevent", "eventlet"])
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.invariant("no-mutex-between-thread-and-greenlets")
def test_thread_that_logs_waits_for_no_greenlet_and_records_keep_their_order(library: str) -> None:
    """A greenlet writes the thread's records."""
    held, seen = run(library, LOG, "redis://nowhere")
    assert held == ["gone on"]
    of_the_thread = ["an error", "of a thread: 0", "of a thread: 1", "of a thread: 2"]
    assert [text for text, _ in seen if text != "of a greenlet"] == of_the_thread
    assert ["of a greenlet", True] in seen
    assert all(in_a_greenlet for _, in_a_greenlet in seen)


@pytest.mark.invariant("no-mutex-between-thread-and-greenlets")
def test_lost_lease_is_reported_by_a_greenlet(library: str, redis_url: str) -> None:
    held, seen = run(library, LOSE, redis_url)
    assert held is False
    # The log line does not wait for receivers, nor they for it.
    assert sorted([text.partition(" ")[0], in_a_greenlet] for text, in_a_greenlet in seen) == [
        ["receiver", True],
        ["the", True],
    ]


@pytest.mark.invariant("no-wake-up-is-lost")
def test_waiting_greenlets_block_only_themselves_and_all_get_the_lock(library: str, redis_url: str) -> None:
    """Also those that wait behind greenlets that are killed."""
    done, most, ticked, seconds = run(library, WAIT, redis_url)
    assert done == list(range(3, 130))
    assert most == 1
    assert ticked >= 5
    assert seconds < 10
