"""The places of calls that have no end yet: at the broker, in the store, or nowhere. For the error of a failed test."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence

import redis

from tests.support.servers import Server
from tests.support.workers import Worker

__all__ = ["ENDS", "describe"]

#: How many log lines of each call, and of each worker, are shown.
LINES = 6
#: The states of a call that has an end.
ENDS = ("SUCCESS", "REVOKED", "FAILURE")


def describe(broker: Server, store: Server, results: Server, calls: Sequence[str], workers: Iterable[Worker]) -> str:
    """Return a text with a paragraph for each of the first calls, and one for each worker.

    Args:
        broker: The broker's server.
        store: The server of the locks.
        results: The server of the results.
        calls: The task ids of the calls. Those that have ended are left out.
        workers: The workers of the test, also those that have ended.
    """
    try:
        states = _states(results, calls)
        calls = [task_id for task_id in calls if states[task_id] not in ENDS]
        found = list(_places(broker, store))
    except redis.RedisError as error:
        return f"the servers do not say where {len(calls)} calls are: {error!r}"
    workers = list(workers)
    logs = [(worker.node, worker.log().splitlines()) for worker in workers]
    lines = [f"{len(calls)} calls have no end:"]
    for task_id in calls[:10]:
        places = [place for text, place in found if task_id in text] or ["nowhere"]
        lines.append(f"  {task_id}: state {states[task_id] or 'PENDING'}, {', '.join(places)}")
        said = [f"    {node}: {line[:200]}" for node, log in logs for line in log if task_id in line]
        lines += said[-LINES:]
    for worker, (node, log) in zip(workers, logs, strict=True):
        ended = "runs" if worker.running else f"ended with {worker.process.returncode}"
        lines.append(f"  {node} {ended}; it said last:")
        lines += [f"    {line[:200]}" for line in log[-LINES:]]
    return "\n".join(lines)


def _states(results: Server, calls: Sequence[str]) -> dict[str, str]:
    with results.client() as client:
        found = client.mget([f"celery-task-meta-{task_id}" for task_id in calls])
    return {task_id: json.loads(meta)["status"] if meta else "" for task_id, meta in zip(calls, found, strict=True)}


def _places(broker: Server, store: Server) -> Iterator[tuple[str, str]]:
    """Yield texts that contain task ids, with the place of each."""
    with broker.client() as client:
        for text in client.lrange("celery", 0, -1):
            yield text, "in the broker's queue"
        taken = dict(client.zrange("unacked_index", 0, -1, withscores=True))
        for tag, text in client.hgetall("unacked").items():
            yield text, f"delivered {time.time() - taken.get(tag, 0):.1f} s ago and not acknowledged"
    with store.client() as client:
        now = client.time()[0]
        for key in client.scan_iter("dlock:*:lock:*"):
            lock = client.hgetall(key)
            if lock.get("token") not in (None, "0"):
                yield lock["id"], f"has the lock of {lock['process']} for {client.pttl(key)} ms"
        for key in client.scan_iter("dlock:*:messages:*"):
            yield from _waiters(client, key, now)
        for key in client.scan_iter("dlock:*:dead:*"):
            for text in client.hvals(key):
                yield text, "a dead letter"


def _waiters(client: redis.Redis, key: str, now: int) -> Iterator[tuple[str, str]]:
    texts = client.hgetall(key)
    lock = client.hgetall(key.replace(":messages:", ":lock:"))
    due = client.zscore(f"{key.partition('}:')[0]}}}:queues", key.partition(":messages:")[2])
    sweep = "never" if due is None else f"in {due / 1e6 - now:.1f} s"
    for identity, text in texts.items():
        if ":" in identity:
            continue
        facts = [name for name in ("over", "tries") if f"{identity}:{name}" in texts]
        if lock.get("acq") == f"grant:{identity}":
            facts.append(f"granted and {'' if lock.get('published') else 'not '}published")
        at = client.zscore(key.replace(":messages:", ":delayed:"), identity)
        if at is not None:
            facts.append(f"due in {at / 1e6 - now:.1f} s")
        if client.zscore(key.replace(":messages:", ":waiting:"), identity) is not None:
            facts.append("due, waiting for the lock")
        yield text, f"parked ({', '.join(facts)}; next sweep {sweep})"
