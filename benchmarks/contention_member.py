"""One process of benchmarks/contention.py: threads that take turns on one lock. Prints what they did as JSON."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

NAME = "benchmarks.contention"


def ours(url: str) -> Callable[[], Any]:
    from celery import Celery  # noqa: PLC0415  # only for this kind

    from celery_dlock import Lock  # noqa: PLC0415  # only for this kind

    app = Celery("contention", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url=url)
    return lambda: Lock(NAME, app=app)


def redis_py(sleep: float) -> Callable[[str], Callable[[], Any]]:
    def connected(url: str) -> Callable[[], Any]:
        import redis  # noqa: PLC0415  # only for this kind

        client = redis.Redis.from_url(url)
        return lambda: client.lock(f"{NAME}.redis-py", timeout=30, sleep=sleep)

    return connected


KINDS: dict[str, Callable[[str], Callable[[], Any]]] = {
    "our Lock": ours,
    "redis-py's Lock": redis_py(0.1),
    "redis-py's Lock, sleep=0.001": redis_py(0.001),
}


def main(kind: str, url: str, threads: int, body: float, seconds: float) -> None:
    """Take turns for so many seconds, from the line that arrives on standard input."""
    lock_of = KINDS[kind](url)
    done: list[list[tuple[float, float, float]]] = [[] for _ in range(threads)]
    unserved = [0.0] * threads

    def turns(mine: list[tuple[float, float, float]], number: int) -> None:
        lock = lock_of()
        while (asked := time.monotonic()) < end:
            lock.acquire()
            got = time.monotonic()
            if got >= end:
                lock.release()
                unserved[number] = end - asked
                return
            time.sleep(body)
            mine.append((asked, got, time.monotonic()))
            lock.release()

    with lock_of():
        pass  # connected, and the scripts are loaded
    print("ready", flush=True)
    sys.stdin.readline()
    cpu = time.process_time()
    end = time.monotonic() + seconds
    running = [threading.Thread(target=turns, args=(mine, number)) for number, mine in enumerate(done)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(json.dumps({"turns": done, "unserved": unserved, "cpu": time.process_time() - cpu}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
