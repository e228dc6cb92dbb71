"""The kit of one test: an app with its locks in memory, other owners of them, and a clock to move."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from celery import states

from ..errors import DLockError, StoreUnavailable
from ..keys.lock_name import BUCKETS, ONE_LOCK, UNKNOWN_SEATS, LockName, one_seat
from ..locking.events import Event
from ..runtime import Runtime
from ..store.base import ReleaseRequest
from ..store.engine.store import EngineStore
from ..store.memory.backend import MemoryBackend
from ..store.model import Acquired, AcquireRequest, Identity, Requester
from ..store.operator_model import Waiter
from ..store.rules.records import Records
from .clock import TravellingClock
from .hand_worker import HandWorker
from .others import ELSEWHERE, NotFreeError, ask_to_stop, name_of, requester_of, settings

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Self

    from ..task.base import SingletonTask

__all__ = ["DLockKit"]

#: The ttl in milliseconds of another owner's lock: longer than tests move the clock.
_LONG_MS: Final = 100 * 366 * 24 * 3600 * 1000
_MOST_WAITERS: Final = 1000
#: The longest time in seconds to wait until another thread has published the message of a grant.
_PUBLISHED_WITHIN: Final = 2.0
#: The prefix of the acquisition ids of owners that the kit plays.
_OWNER: Final = "dlock-testing."


class DLockKit:
    """Keeps the locks of an app in memory for a ``with`` block, and plays the other workers.

    Calls run eagerly in this process (``task_always_eager``). With ``eager=False`` they are published, and run in a
    worker that the test starts, or one by one by :meth:`run_next`.

    The end of the block checks that no lock is held and no call waits.

    Args:
        app: The app. :meth:`run_next` needs an app whose broker is ``memory://``.
        eager: Run calls at once, in the call of ``delay()``.
    """

    def __init__(self, app: Celery, *, eager: bool = True) -> None:
        self._app = app
        self._eager = eager
        self._runtime = Runtime.of(app)
        self._stack = ExitStack()
        self._clock = TravellingClock(self._move_others)
        self._numbers = 0
        self._hand_worker: HandWorker | None = None
        #: What happened to locks, in order. See :class:`celery_dlock.locking.events.Event` for the fields.
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        # The first call that needs the directory makes it. Its name is unique, so that two test runs on one machine do
        # not share lock files.
        run_dir = Path(tempfile.gettempdir(), f"celery-dlock-testing-{uuid.uuid4().hex}")
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
            stack.enter_context(
                settings(
                    self._app,
                    dlock_url="memory://",
                    dlock_transport_options=None,
                    dlock_durability="primary",
                    dlock_quarantine=None,
                    dlock_run_dir=run_dir,
                    dlock_enabled=True,
                    task_always_eager=self._eager,
                    task_store_eager_result=self._app.conf.task_store_eager_result,
                )
            )
            stack.enter_context(self._runtime.started_anew(self._clock))
            self._runtime.listeners.add(self.events.append)
            stack.callback(self._runtime.listeners.remove, self.events.append)
            stack.callback(self._stop_worker)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                self._check_that_nothing_is_left()

    def _stop_worker(self) -> None:
        if self._hand_worker is not None:
            self._hand_worker.stop()

    def _check_that_nothing_is_left(self) -> None:
        left = []
        for name in self._names():
            for lock in self._locks(name):
                holder = self._store.describe(lock).holder
                if holder is not None and holder.state == "held":
                    left.append(f"{lock} is held by {holder.task or 'a Lock'}[{holder.task_id}]")
            waiting = self._store.list_waiters(name, 1).count
            if waiting:
                left.append(f"{waiting} calls wait for {name}")
        assert not left, "; ".join(left)

    # -- the store

    @property
    def _store(self) -> EngineStore:
        store = self._runtime.lock_store
        assert isinstance(store, EngineStore)
        return store

    @property
    def _memory(self) -> MemoryBackend:
        memory = self._store.backend
        assert isinstance(memory, MemoryBackend)
        return memory

    def _move_others(self, seconds: float) -> None:
        self._memory.clock.travel(seconds)
        # Otherwise the next lease would warn that the watchdog has not looked at the leases for that time.
        lease_table: Any = self._runtime.lease_table
        lease_table.scanned_at = self._clock.monotonic()

    def _names(self) -> list[LockName]:
        """Return all lock names. A name with seats (``limit``) has ``seats=0``, which means all of its seats."""
        with self._memory.step():
            names = [LockName(text, bucket) for bucket, text in sorted(self._memory.names)]
        return [name if self._store.seats(name) == 1 else name._replace(seats=UNKNOWN_SEATS) for name in names]

    def _locks(self, name: LockName) -> list[LockName]:
        """Return the held locks of a name: its one lock or, with a ``limit``, those of its seats."""
        seats = self._store.run(name, Records.taken_seats)
        return [one_seat(name, seat) if seat else name._replace(seats=1) for seat in seats]

    def _acquisition(self) -> str:
        self._numbers += 1
        return f"{_OWNER}{self._numbers}"

    # -- other owners

    @contextmanager
    def held(self, task: SingletonTask | str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Return a context in which another owner holds the lock of this call.

        At its end the lock is released, and granted to the first waiter (``on_conflict="queue"``).

        If the task has a ``limit``, other owners hold all of its free seats, so that the next call is a conflict.
        :meth:`held_seats` leaves some free.

        If the task has ``on_store_error="local"``, this works inside :meth:`store_down` too. The owner then holds the
        lock on this machine. In all other cases, the owner is on another machine.

        Args:
            task: The task, or the name of a ``Lock``.
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
        """
        name, by = name_of(task, args, kwargs), requester_of(task)
        local = not isinstance(task, str) and task.lock_options.on_store_error == "local"
        if local and self._memory.failure:
            with self._held_here(name, self._acquisition(), by):
                yield
            return
        with ExitStack() as stack:
            self._hold(stack, name, by)
            if name.seats != ONE_LOCK:
                with suppress(NotFreeError):
                    while True:
                        self._hold(stack, name, requester_of(task))
            yield

    @contextmanager
    def held_seats(self, number: int, task: SingletonTask, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Return a context in which other owners hold some of the seats of this call's name (``limit``).

        Args:
            number: The number of seats that they hold.
            task: The task.
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
        """
        if type(number) is not int:
            raise DLockError(f"invalid number of seats {number!r}: expected a whole number, and after it the task")
        name = name_of(task, args, kwargs)
        if not 1 <= number <= name.seats:
            raise DLockError(f"cannot hold {number} seats of {task.name!r}: expected 1 to {name.seats}, its limit")
        with ExitStack() as stack:
            for _ in range(number):
                self._hold(stack, name, requester_of(task))
            yield

    def _hold(self, stack: ExitStack, name: LockName, by: Requester) -> None:
        """Take a lock, or a seat of it, until the end of the stack."""
        acquisition = self._acquisition()
        self._take(name, acquisition, AcquireRequest(by))
        stack.callback(self._end_hold, name, acquisition)

    def _end_hold(self, name: LockName, acquisition: str) -> None:
        released = self._store.release(name, acquisition, ReleaseRequest(queue=True))
        self._runtime.grant_publisher.publish_next(name, released.granted)

    @contextmanager
    def _held_here(self, name: LockName, owner: str, by: Requester) -> Iterator[None]:
        holder = self._runtime.lock_files.acquire(name, owner, self, by)
        if holder is not None:
            raise DLockError(f"cannot prepare {name}, because its lock is not free on this machine: {holder}")
        try:
            yield
        finally:
            self._runtime.lock_files.release(name, owner, self)

    def _take(self, name: LockName, acquisition: str, request: AcquireRequest) -> Acquired:
        answer = self._store.acquire(name, acquisition, _LONG_MS, request)
        if not isinstance(answer, Acquired):
            raise NotFreeError(f"cannot prepare {name}, because its lock is not free: {answer}")
        return answer

    def _begin_earlier_run(self, task: SingletonTask, args: Any, kwargs: Any) -> tuple[LockName, str, str, str]:
        """Begin a run in another worker. Return its lock name, acquisition, task id and idempotency key's seed."""
        once = task.lock_options.once_seconds
        if not once or task.lock_options.once_per == "tick":
            raise DLockError(
                f"task {task.name!r} remembers no earlier run: expected once_per with a duration or 'forever'"
            )
        name, acquisition, task_id = name_of(task, args, kwargs), self._acquisition(), str(uuid.uuid4())
        by = Requester.of(task.name, task_id, ELSEWHERE, 1)
        window_ms = round(once * 1000)
        request = AcquireRequest(by, Identity(task_id), once=True, run_mark_ms=window_ms)
        return name, acquisition, task_id, self._take(name, acquisition, request).seed

    def used(self, task: SingletonTask, *args: Any, result: Any = None, **kwargs: Any) -> str:
        """Make this call's name used: an earlier run of it succeeded in another worker (``once_per``).

        Args:
            task: The task.
            args: The call's positional arguments.
            result: The result of that run, which the result backend then has (``on_used="return"``).
            kwargs: The call's keyword arguments.

        Returns:
            The task id of that run.
        """
        name, acquisition, task_id, seed = self._begin_earlier_run(task, args, kwargs)
        by = Requester.of(task.name, task_id, ELSEWHERE, 1).text
        window_ms = round((task.lock_options.once_seconds or 0) * 1000)
        ending = ReleaseRequest(
            final=True, identity=Identity(task_id).digest, used_ms=window_ms, requester=by, once=True, seed=seed
        )
        self._store.release(name, acquisition, ending)
        if result is not None:
            self._app.conf.task_store_eager_result = True  # else Celery reads no result while calls run eagerly
            self._app.backend.store_result(task_id, result, states.SUCCESS)
        return task_id

    def crashed(self, task: SingletonTask, *args: Any, **kwargs: Any) -> str:
        """Record an earlier run of this call, in another worker, whose process died. Return the task id of that run."""
        name, _, task_id, _ = self._begin_earlier_run(task, args, kwargs)
        self._store.run(name, Records.drop_lock)
        return task_id

    def lose(self, task: SingletonTask | str, *args: Any, **kwargs: Any) -> None:
        """End the lease of this call while its body runs. ``lease.ensure()`` then raises ``LockLost``.

        If the task has a ``limit``, all calls of this name lose their seats, except those that :meth:`held` plays.
        """
        name = name_of(task, args, kwargs)

        def drop(records: Records) -> bool:
            found = records.lock()
            if found is None or (name.seats != ONE_LOCK and found.acquisition.startswith(_OWNER)):
                return False
            records.drop_lock()
            return True

        if not sum(self._store.run(lock, drop) for lock in self._locks(name)):
            raise DLockError(f"cannot lose {name}: nothing holds its lock")

    def replace(self, task: SingletonTask, *args: Any, **kwargs: Any) -> str:
        """Let a newer call of another worker ask this call's running body to stop (``on_conflict="replace"``).

        Call it while the body runs, from a fake that the body uses. ``lease.ensure()`` then raises ``Replaced``. The
        newer call itself does not run in this test: it is removed while it waits. If another call of the test already
        waits for the lock, that call ends REVOKED.

        Args:
            task: The task.
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.

        Returns:
            The task id of the newer call.
        """
        if not task.lock_options.replaces:
            raise DLockError(f"a newer call of {task.name!r} stops no body: expected on_conflict='replace'")
        name = name_of(task, args, kwargs)
        return ask_to_stop(self._runtime, self._store, name, task, self._acquisition(), _LONG_MS)

    @contextmanager
    def store_down(self, reason: str = "the test took the lock store away") -> Iterator[None]:
        """Return a context in which the lock store does not answer.

        With ``on_store_error="local"``, calls then hold lock files in a directory of this test. Inside this context,
        :meth:`held` plays another call on the same machine.
        """
        self._memory.failure = reason
        try:
            yield
        finally:
            self._memory.failure = ""

    # -- time

    def travel(self, seconds: float) -> None:
        """Move the clocks forward.

        These clocks decide when a ttl, ``once_per``, ``min_hold``, ``debounce`` or a grant ends, and when
        :meth:`run_next` finds that a message's ETA is reached.

        If the lock of a waiting call is free, and the call is due, it then gets the lock and is published.
        """
        self._clock.travel(seconds)
        with suppress(StoreUnavailable):
            for name in self._store.list_due_queues(range(BUCKETS), _MOST_WAITERS):
                self._sweep(name)
            # The thread of a worker may have swept the lock first, and be about to publish the message.
            end = time.monotonic() + _PUBLISHED_WITHIN
            while any(map(self._is_unpublished, self._names())) and time.monotonic() < end:
                time.sleep(0.001)

    def _sweep(self, name: LockName) -> None:
        conf = self._runtime.settings
        grant_timeout_ms = round(conf.grant_timeout * 1000)
        # A sweep grants one seat, and more seats may be free.
        while True:
            swept = self._store.sweep(name, self._acquisition(), grant_timeout_ms, conf.grant_attempts)
            published = self._runtime.grant_publisher.publish_next(name, swept.granted)
            if swept.granted is None or not published or name.seats == ONE_LOCK:
                return

    def _is_unpublished(self, name: LockName) -> bool:
        def granted(records: Records) -> bool:
            locks = (records.seat(seat).lock() for seat in records.taken_seats())
            return any(lock is not None and lock.due is not None and not lock.published for lock in locks)

        return self._store.run(name, granted)

    # -- the queue

    def waiting(self, task: SingletonTask, *args: Any, **kwargs: Any) -> list[Waiter]:
        """Return the calls that wait for this call's lock; without arguments, all waiting calls of the task."""
        names = [name_of(task, args, kwargs)] if args or kwargs else self._names()
        views = [view for name in names for view in self._store.list_waiters(name, _MOST_WAITERS).waiters]
        return [view for view in views if args or kwargs or view.task == task.name]

    def run_next(self) -> bool:
        """Run the next message in this thread, as a worker would. Needs ``eager=False`` and the broker ``memory://``.

        The message may be a new call, a retry whose time has come, or a waiter that got its lock.

        Returns:
            False if there is no message.
        """
        if self._eager:
            raise DLockError("calls run eagerly, so there is no message: expected DLockKit(app, eager=False)")
        if self._hand_worker is None:
            self._hand_worker = HandWorker(self._app, self._clock.monotonic)
        return self._hand_worker.run_next()

    def run_all(self) -> int:
        """Call :meth:`run_next` until there is no message. Return how many there were."""
        count = 0
        while self.run_next():
            count += 1
        return count
