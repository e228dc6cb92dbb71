"""The app of `make chaos`: bodies that write down when they run, and write to a fenced resource."""

import os
import signal
import sqlite3
import time
from contextlib import closing, suppress
from typing import Any

from celery_dlock import LockLost, Replaced, singleton_task
from celery_dlock.locking.watchdog import Watchdog
from celery_dlock.worker.pool_children import ChildWatch
from celery_dlock.worker.request import SingletonRequest
from chaos.gaps import watch_for_gaps
from chaos.history import History
from chaos.resource import LIMIT, TRIES, seat_of, write
from tests.support.apps.base import make_app, still_held

TTL = 2.0
SLICE = 0.05

app = make_app(
    "chaos",
    dlock_grant_timeout=4,
    dlock_grant_attempts=10,
    task_publish_retry=False,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    broker_connection_max_retries=None,
    broker_transport_options={
        "visibility_timeout": 6,
        "unacked_restore_interval": 0.5,
        # A worker that dies while it restores keeps the others from it for so long, else for 5 minutes.
        "unacked_mutex_expire": 2,
        "socket_timeout": 5,
    },
)
history = History.of_environ()


def noted(kind: str, **facts: Any) -> None:
    history.note(kind, **facts)


def note_acknowledgements() -> None:
    """Note when a worker's main process has sent the acknowledgement of a message."""
    send = SingletonRequest._dlock_send

    def noting(request: Any, verb: str, *args: Any, **kwargs: Any) -> None:
        send(request, verb, *args, **kwargs)
        noted("acked", id=request.id, main=os.getpid())

    SingletonRequest._dlock_send = noting  # type: ignore[method-assign]  # there is no hook


def note_kills() -> None:
    """Note when a worker's main process kills a pool child whose body does not stop (`stop` with seconds)."""
    send = ChildWatch.send

    def noting(child: ChildWatch, number: int) -> None:
        if number == signal.SIGKILL:
            noted("killed", pid=child.pid)
        send(child, number)

    ChildWatch.send = noting  # type: ignore[method-assign]  # there is no hook


def body(task: Any, name: str, number: int, seconds: float, end: str) -> None:
    """Be inside `name` for `seconds`; `end` is how: "return", or once "exit" (the process dies)."""
    lease, run = task.lease, os.urandom(6).hex()
    if task.lock_options.limit > 1:
        name = seat_of(name, lease.seat)  # one body at a time, with a fence of its own
    how = "return"
    noted(
        "in", run=run, id=task.request.id, name=name, token=lease.token, pid=os.getpid(),
        main=os.getppid() if task.request.delivery_info and _prefork() else os.getpid(), task=task.name,
    )  # fmt: skip
    try:
        written(run, name, lease.token, task.request.id)
        (inside_deaf if task.lock_options.kill_after is not None else inside)(run, lease, seconds)
        if end == "exit" and first_time(task.request.id):
            noted("exit", run=run, pid=os.getpid(), log=os.environ["DLOCK_CHAOS_LOG"])
            os._exit(3)
        if number % 2 and task.lock_options.on_lost == "continue":
            asked = time.monotonic_ns()
            noted("ensure", run=run, ok=still_held(lease), asked=asked)
        written(run, name, lease.token, task.request.id)
    except BaseException as error:
        how = type(error).__name__
        raise
    finally:
        try:
            noted("out", run=run, how=how)
        except (LockLost, Replaced) as late:
            # The exception that stops a body may strike just here.
            noted("out", run=run, how=type(late).__name__)
            raise


def inside(run: str, lease: Any, seconds: float) -> None:
    until, told = time.monotonic() + seconds, False
    while True:
        if not told and not lease.held:
            told = True
            noted("told", run=run)
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(SLICE, left))


def inside_deaf(run: str, lease: Any, seconds: float) -> None:
    """Be inside to the end, though a newer call asks the body to stop."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        with suppress(Replaced):
            inside(run, lease, left)


def written(run: str, name: str, token: int, task_id: str) -> None:
    noted("write", run=run, ok=write(os.environ["DLOCK_CHAOS_RESOURCE"], name, token, task_id))


def first_time(task_id: str) -> bool:
    """Only the first run of a message dies: it is delivered again."""
    with closing(sqlite3.connect(os.environ["DLOCK_CHAOS_RESOURCE"], timeout=TRIES)) as db, suppress(sqlite3.Error), db:
        return db.execute("INSERT OR IGNORE INTO exits VALUES (?)", (task_id,)).rowcount == 1
    return False


def _prefork() -> bool:
    return os.environ.get("DLOCK_CHAOS_POOL") == "prefork"


def singleton(name: str, on_conflict: str, *, late: bool = True, key: str = "chaos:{name}", **options: Any) -> Any:
    made: Any = singleton_task(
        app=app, bind=True, name=f"chaos.{name}", scope="shared", key=key, ttl=TTL, on_conflict=on_conflict,
        acks_late=late, **options,
    )  # fmt: skip
    return made(body)


BACK: dict[str, Any] = {"retry_delay": 0.3, "retry_delay_max": 2.0}

skips = singleton("skips", "skip")
retries = singleton("retries", "retry", **BACK)
queues = singleton("queues", "queue")
debounces = singleton("debounces", "queue", debounce=(0.5, 2))
replaces = singleton("replaces", "replace")
replaces_kill = singleton("replaces_kill", "replace", stop=0.5)
waits = singleton("waits", "retry", wait=1, **BACK)
waits_queues = singleton("waits_queues", "queue", wait=0.5)
aborts = singleton(
    "aborts", "retry", on_lost="abort", autoretry_for=(LockLost,), max_retries=None, default_retry_delay=0.3, **BACK
)
retries_early = singleton("retries_early", "retry", late=False, **BACK)
seats = singleton("seats", "queue", key="chaos-seats:{name}", limit=LIMIT)
seats_retry = singleton("seats_retry", "retry", key="chaos-seats:{name}", limit=LIMIT, **BACK)
queues_early = singleton("queues_early", "queue", late=False)


watch_for_gaps(history)
note_acknowledgements()
note_kills()

if os.environ.get("DLOCK_CHAOS_RENEWAL") == "off" and "DLOCK_CHAOS_POOL" in os.environ:  # in workers only
    # For the test of the checker: locks that are not renewed have to show.
    Watchdog._renew = lambda self, due, held: True  # type: ignore[method-assign]  # this is the point
