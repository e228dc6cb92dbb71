"""Programs that hold locks outside any worker, and print lines.

``python -m tests.support.apps.locks <program> <url>``
"""

import ctypes
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

import psutil
from celery import Celery

from celery_dlock import Lock
from celery_dlock.errors import NotHeld
from celery_dlock.locking import watchdog
from celery_dlock.utils import threads as native_threads


def app_at(url: str) -> Celery:
    app = Celery("locks", broker="memory://", set_as_current=False)
    app.conf.dlock_url = url
    return app


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201  # this is a program


def hold(url: str) -> None:
    """Hold "x" with a ttl of 3 s until killed."""
    with Lock("x", app=app_at(url), ttl=3) as lock:
        assert lock.lease
        say("held", lock.lease.token)
        time.sleep(60)


def fork_in_c(url: str) -> None:
    """As a server written in C forks, which tells Python nothing of it (uWSGI, unless it is asked to).

    Python itself cannot do this while another thread waits for the interpreter. The child inherits that wait, and hangs
    as soon as a second thread of its own waits (glibc counts the lost thread). So the watchdog sleeps here.
    """
    usual, watchdog.ROUND = watchdog.ROUND, 20.0

    def make() -> int:
        while not any(frame.f_code is native_threads.sleep.__code__ for frame in sys._current_frames().values()):
            time.sleep(0.01)
        pid: int = ctypes.PyDLL(None).fork()
        if pid == 0:
            watchdog.ROUND = usual
        return pid

    fork(url, make)


def fork(url: str, make: Callable[[], int] = os.fork) -> None:
    """Fork while holding "x": the child tries everything to get rid of it."""
    lock = Lock("x", app=app_at(url))
    with lock:
        holder = lock.holder()
        assert holder
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside the watchdog's thread, as users do
        taken, told = os.pipe()
        pid = make()
        if pid == 0:
            forked(lock, taken)
        with Lock("z", app=lock._runtime.app):
            os.write(told, b"1")
            os.waitpid(pid, 0)
        after = lock.holder()
        say("parent still holds", after is not None and after.owner == holder.owner)
    say("free afterwards", not lock.locked())


def forked(lock: Lock, taken: int) -> NoReturn:
    # Both have entered once before the fork and now enter for the second time: not as one owner.
    os.read(taken, 1)
    app = lock._runtime.app
    say("acquire what the parent took next", Lock("z", app=app).acquire(blocking=False))
    say("lease in child", lock.lease)
    try:
        lock.release()
    except NotHeld:
        say("release in child: NotHeld")
    try:
        lock.__exit__(None, None, None)
    except NotHeld:
        say("leaving in child: NotHeld")
    say("acquire in child", lock.acquire(blocking=False))
    # Its own lock works, and its watchdog keeps it.
    with Lock("y", app=app, ttl=2) as other:
        time.sleep(2.4)
        say("kept in child", other.lease is not None and other.lease.held)
    os._exit(0)


def crowd(url: str) -> None:
    """200 locks at once: how many threads keep them, over how many connections, and what is left afterwards."""
    watchdog.IDLE_ROUNDS = 3
    app, me = app_at(url), psutil.Process()
    alone = me.num_threads()
    locks = [Lock(str(number), app=app, ttl=2) for number in range(200)]
    for lock in locks:
        lock.acquire()
    time.sleep(3.0)
    say("watchdogs", me.num_threads() - alone)
    # psutil 6 renamed it, the old name warns.
    connections = getattr(me, "net_connections", None) or me.connections
    say("connections", sum(1 for connection in connections("tcp") if connection.status == "ESTABLISHED"))
    say("still held", sum(1 for lock in locks if lock.lease and lock.lease.held and lock.locked()))
    for lock in locks:
        lock.release()
    end = time.monotonic() + 10
    while me.num_threads() > alone and time.monotonic() < end:
        time.sleep(0.05)
    say("watchdogs left", me.num_threads() - alone)
    with Lock("again", app=app, ttl=2) as lock:
        time.sleep(2.6)
        say("kept again", lock.lease is not None and lock.lease.held)


def count(url: str) -> None:
    """Eight threads add one to a plain number, 25 times each, with a gap between reading and writing it."""
    app, total = app_at(url), [0]
    with Lock("x", app=app):
        pass

    def add() -> None:
        lock = Lock("x", app=app)
        for _ in range(25):
            with lock:
                seen = total[0]
                time.sleep(0)
                total[0] = seen + 1

    together([add] * 8)
    say("total", total[0])


def first(url: str) -> None:
    """Eight threads use an app for the first time, all at once; with ten apps, one after the other."""
    failed = []
    for number in range(10):
        app, start = app_at(url), threading.Barrier(8)

        def use(app: Celery = app, start: threading.Barrier = start, name: str = str(number)) -> None:
            start.wait(10)
            lock = Lock(name, app=app)
            try:
                if lock.acquire(blocking=False):
                    lock.release()
            except NotHeld as error:
                failed.append(error)

        together([use] * 8)
    say("failed", len(failed))


def together(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


PROGRAMS: dict[str, Callable[[str], None]] = {
    "hold": hold,
    "fork": fork,
    "fork_in_c": fork_in_c,
    "crowd": crowd,
    "count": count,
    "first": first,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2])
