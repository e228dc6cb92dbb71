"""Owners: bodies that run at once are never one owner, and nested entries of one thread always are."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
from celery import Celery, states

from celery_dlock import Lock, singleton_task
from celery_dlock.errors import NotHeld
from tests.support.processes import ROOT

Ways = Callable[..., list[Any]]


def in_threads_with_the_context(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(copy_context().run, call) for call in calls]
        return [future.result(30) for future in futures]


def by_to_thread(*calls: Callable[[], Any]) -> list[Any]:
    async def main() -> list[Any]:
        return list(await asyncio.gather(*(asyncio.to_thread(call) for call in calls)))

    return asyncio.run(main())


def in_plain_threads(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call) for call in calls]]


ELSEWHERE = pytest.mark.parametrize("elsewhere", [by_to_thread, in_threads_with_the_context, in_plain_threads])


def in_a_copied_context(call: Callable[[], Any]) -> Any:
    return copy_context().run(call)


def in_an_asyncio_task(call: Callable[[], Any]) -> Any:
    async def work() -> Any:
        return call()

    async def main() -> Any:
        return await asyncio.create_task(work())

    return asyncio.run(main())


def at_once(call: Callable[[], Any]) -> Any:
    return call()


HERE = pytest.mark.parametrize("here", [at_once, in_a_copied_context, in_an_asyncio_task])


class Room:
    """Count the bodies that are inside at once. The first one stays until a second one comes, or does not."""

    def __init__(self) -> None:
        self.inside = self.most = self.visits = 0
        self._guard = threading.Lock()
        self._crowd = threading.Event()

    def visit(self) -> None:
        with self._guard:
            self.visits += 1
            self.inside += 1
            self.most = max(self.most, self.inside)
            if self.inside > 1:
                self._crowd.set()
        self._crowd.wait(0.15)
        with self._guard:
            self.inside -= 1


def run(app: Celery, body: Callable[[], Any]) -> Any:
    """Return the result of `body`, run as the body of a singleton task."""

    @singleton_task(app=app, name=f"owners.{body.__name__}", key="outer", scope="shared")
    def outer() -> Any:
        return body()

    app.finalize()  # as a worker does: Celery hands out tasks half made to threads that ask for one at once
    result = outer.apply()
    assert result.state == states.SUCCESS, result.traceback
    return result.result


@pytest.mark.core
@ELSEWHERE
def test_a_helper_in_another_thread_does_not_hold_what_its_task_holds(app: Celery, elsewhere: Ways) -> None:
    def body() -> Any:
        with Lock("mine", app=app):
            return elsewhere(
                lambda: Lock("mine", app=app).acquire(blocking=False),
                lambda: Lock("outer", app=app).acquire(blocking=False),
                lambda: Lock("free", app=app).acquire(blocking=False),
            )

    assert run(app, body) == [False, False, True]


@ELSEWHERE
def test_helper_in_another_thread_cannot_release_its_tasks_lock(app: Celery, elsewhere: Ways) -> None:
    def body() -> Any:
        def give_back() -> str:
            with pytest.raises(NotHeld):
                Lock("mine", app=app).release()
            return "refused"

        with Lock("mine", app=app) as lock:
            answers = elsewhere(give_back)
            assert lock.lease is not None
            lock.lease.ensure()
            return answers

    assert run(app, body) == ["refused"]


@pytest.mark.core
@ELSEWHERE
def test_two_runs_of_one_name_started_by_one_body_follow_each_other(app: Celery, elsewhere: Ways) -> None:
    room = Room()

    @singleton_task(app=app, name="owners.inner", wait=10)
    def inner(number: int) -> int:
        room.visit()
        return number

    def body() -> Any:
        return [result.result for result in elsewhere(*[lambda: inner.apply((1,))] * 2)]

    assert run(app, body) == [1, 1]
    assert (room.most, room.visits) == (1, 2)


@ELSEWHERE
@pytest.mark.parametrize("inside", [True, False], ids=["in a task", "outside"])
def test_two_locks_in_copies_of_one_context_exclude_each_other(app: Celery, elsewhere: Ways, *, inside: bool) -> None:
    room = Room()

    def locked() -> bool:
        with Lock("one", app=app):
            room.visit()
            return True

    def body() -> Any:
        with Lock("other", app=app):  # so that this context has an owner to copy
            return elsewhere(locked, locked)

    assert (run(app, body) if inside else body()) == [True, True]
    assert (room.most, room.visits) == (1, 2)


@pytest.mark.core
@HERE
def test_a_run_nested_in_the_same_thread_reenters(app: Celery, here: Callable[[Any], Any]) -> None:
    """It would wait for itself for ever."""

    @singleton_task(app=app, bind=True, name="owners.nested", key="outer", scope="shared", on_conflict="raise")
    def nested(self: Any) -> tuple[int, int]:
        return self.lease.hold_count, self.lease.token

    def body() -> Any:
        inner = here(nested.apply)
        assert inner.state == states.SUCCESS, inner.traceback
        lease = Lock("outer", app=app).lease
        assert lease is not None
        return inner.result, lease.token, lease.hold_count

    (count, inner_token), token, after = run(app, body)
    assert (count, after) == (2, 1)
    assert inner_token == token


@HERE
def test_a_lock_nested_in_the_same_thread_reenters(app: Celery, here: Callable[[Any], Any]) -> None:
    def body() -> Any:
        with Lock("mine", app=app) as lock:
            assert here(lambda: Lock("mine", app=app).acquire(blocking=False))
            assert lock.lease is not None
            counted = lock.lease.hold_count
            lock.release()
            return counted

    assert run(app, body) == 2
    assert not Lock("mine", app=app).locked()


GREENLETS = """
import sys
pool, url = sys.argv[1:]
if pool == "gevent":
    from gevent.monkey import patch_all; patch_all()
else:
    import eventlet; eventlet.monkey_patch()
import json
from celery import Celery
from celery_dlock import Lock, singleton_task

app = Celery("green", broker="memory://", set_as_current=False)
app.conf.dlock_url = url

def spawned(*calls):
    if pool == "gevent":
        import gevent
        jobs = [gevent.spawn(call) for call in calls]
        gevent.joinall(jobs, raise_error=True)
        return [job.value for job in jobs]
    return [job.wait() for job in [eventlet.spawn(call) for call in calls]]

@singleton_task(app=app, key="outer", scope="shared")
def outer():
    with Lock("mine", app=app):
        return spawned(
            lambda: Lock("mine", app=app).acquire(blocking=False),
            lambda: Lock("outer", app=app).acquire(blocking=False),
            lambda: Lock("free", app=app).acquire(blocking=False),
        ) + [Lock("mine", app=app).acquire(blocking=False)]

print(json.dumps(outer.apply().get()))
"""


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_a_greenlet_that_a_body_spawns_is_another_owner(redis_url: str, pool: str) -> None:
    """The body itself, tried last, re-enters."""
    command = [sys.executable, "-W", "ignore", "-c", GREENLETS, pool, redis_url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, True, True]
