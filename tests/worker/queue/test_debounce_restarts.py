"""``debounce`` while store, broker and workers restart: 1,000 calls of 20 names in five bursts."""

import json
import time
from collections import Counter
from contextlib import ExitStack

import pytest
import redis

from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.queueing"
NAMES, CALLS, BURSTS = 20, 10, 5


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.invariant("debounce-runs-the-newest-call")
def test_each_burst_runs_one_call_although_everything_restarts(tmp_path):
    with ExitStack() as stack:
        broker = stack.enter_context(Server(tmp_path / "broker", persistent=True))
        store = stack.enter_context(Server(tmp_path / "store", persistent=True))
        urls = Urls(broker.url(0), broker.url(1), store.lock_url(2))
        tasks = stack.enter_context(loaded_app(APP, urls))
        workers = [stack.enter_context(running_worker(APP, folder=tmp_path, urls=urls)) for _ in range(2)]
        sent = {}

        def kill_worker():
            workers[0].kill()
            workers[0] = stack.enter_context(running_worker(APP, folder=tmp_path, urls=urls))

        restarts = [lambda: None, store.restart, kill_worker, broker.restart, lambda: (store.kill(), store.start())]
        for number, restart in enumerate(restarts):
            burst = send(tasks.saves_patiently, number)
            sent |= burst
            newest = [task_id for task_id, (_, text) in burst.items() if text == f"{number}.{CALLS - 1}"]
            # A call that its worker has not parked yet would be delivered again, and count as received then.
            eventually(lambda ids=burst, last=newest: settled(broker, store, ids, last), 60, message="calls are away")
            restart()
            eventually(lambda ids=burst: ended(broker, ids) == set(ids), 90, message="calls have no end")
        states = Counter(status for _, status in results(broker, sent))
        ran = {(body["n"], body["text"]) for body in bodies(broker)}
    assert len(sent) == NAMES * CALLS * BURSTS == 1000
    assert states == {"SUCCESS": NAMES * BURSTS, "REVOKED": 1000 - NAMES * BURSTS}
    # Two workers may receive calls in another order than that in which they were sent, so any of a burst may be newest.
    once = {(f"d{n}", str(burst)): 1 for n in range(NAMES) for burst in range(BURSTS)}
    assert Counter((n, text.partition(".")[0]) for n, text in ran) == once


def send(task, burst):
    """Send one burst of each name. Return name and text of each call, by task id."""
    calls = {}
    for n in range(NAMES):
        for number in range(CALLS):
            text = f"{burst}.{number}"
            calls[task.delay(f"d{n}", text=text).id] = (f"d{n}", text)
    return calls


def parked(store):
    with store.client(2) as client:
        keys = list(client.scan_iter("dlock:*:messages:*"))
        entries = [entry for key in keys for entry in client.hvals(key) if entry.startswith("[")]
    return {json.loads(entry.partition("\n")[0])[1] for entry in entries}


def results(broker, calls):
    with broker.client(1) as client:
        found = client.mget([f"celery-task-meta-{task_id}" for task_id in calls])
    return [
        (text, json.loads(meta)["status"] if meta else "")
        for (_, text), meta in zip(calls.values(), found, strict=True)
    ]


def settled(broker, store, calls, newest):
    """Every older call has its end, and the newest ones wait, unless a slow machine let them run already."""
    open_ = set(calls) - ended(broker, calls)
    return open_ <= set(newest) and open_ <= parked(store)


def ended(broker, calls):
    try:
        with broker.client(1) as client:
            found = client.mget([f"celery-task-meta-{task_id}" for task_id in calls])
    except redis.ConnectionError:
        time.sleep(0.2)
        return set()
    states = [json.loads(meta)["status"] if meta else "" for meta in found]
    return {task_id for task_id, state in zip(calls, states, strict=True) if state in ("SUCCESS", "REVOKED")}


def bodies(broker):
    with broker.client(1) as client:
        noted = [json.loads(text) for text in client.lrange("history", 0, -1)]
    return [fact for fact in noted if fact["what"] == "in"]
