"""The thread of a worker that publishes turns nobody else hands over: of dead holders, dead releasers, dead waiters."""

from __future__ import annotations

import collections
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from .errors import StoreUnavailable
from .handover import Handover
from .keys import BUCKETS, LockKeys, LockName
from .records import Grant
from .runtime import Runtime
from .voice import logger

__all__ = ["Sweeper"]


#: Seconds between two looks at what the worker leaves to this thread.
TICK: Final = 0.1
#: Seconds in which every bucket is looked at once, and locks of one bucket that are looked after in one round.
ROUND: Final = 2.0
MOST: Final = 100
#: Seconds between two looks of a worker that has no reason to sweep: a call may have chosen to wait, and the worker
#: that knew of it may have died. And until such a look is tried again that was not answered.
LOOK: Final = 30.0
AGAIN: Final = 2.0
#: Longer than any lock with waiters is held: a year.
EVER: Final = 366 * 24 * 3600.0


class HeldBack(Protocol):
    """A delivery whose acknowledgement is held back."""

    @property
    def acknowledged(self) -> bool: ...
    @property
    def dlock_number(self) -> int: ...
    def dlock_acknowledge(self) -> None: ...


class Sweeper:
    """Sweeps, publishes, and acknowledges what was held back; a broker or a store that hangs holds up nothing else.

    The keeper must not do this: a slow broker would cost leases.

    Args:
        runtime: Whose queues to look after.
        revoked: What was revoked since the last call and may wait.
        soon: Has the worker's consumer call something: only its own thread may write to its connection.
        goes_on: Asked before each tick; false ends the thread.
        look_for_unheard: Marks what has ended without the broker having heard of it.
        parks: Are there tasks that wait in the store? If not, it sweeps once a call has chosen to, or one of its rare
            looks has found one that waits.
    """

    def __init__(
        self,
        runtime: Runtime,
        revoked: Callable[[], list[tuple[LockName, str]]],
        soon: Callable[[Callable[[], None]], object],
        goes_on: Callable[[], bool],
        look_for_unheard: Callable[[], None] = lambda: None,
        *,
        parks: bool = True,
    ) -> None:
        self._runtime = runtime
        self._sweeps = parks
        self._soon = soon
        self._revoked = revoked
        self._goes_on = goes_on
        self._look_for_unheard = look_for_unheard
        self._connection: Any = None
        settings = runtime.settings
        self._store = runtime.store(settings.timeout)
        self._handover = Handover(runtime.app, self._store, settings.prefix, settings.turn, self._producer)
        # Deques: append and popleft are atomic, so no lock that a signal handler or a greenlet could sit on.
        self._grants: collections.deque[tuple[LockName, Grant]] = collections.deque()
        self._gone: collections.deque[tuple[LockName, str]] = collections.deque()
        self._unacknowledged: collections.deque[HeldBack] = collections.deque()
        self._failing = False
        self._next_look = 0.0

    def start(self) -> None:
        # Not a real thread beside greenlets: it publishes and stores ends, and both take locks that greenlets share.
        threading.Thread(target=self._run, name="dlock-sweeper", daemon=True).start()

    def hand_over(self, name: LockName, grant: Grant) -> None:
        """Publish a message whose turn it is."""
        self._grants.append((name, grant))

    def gone(self, name: LockName, identity: str) -> None:
        """A message ended before it started: if it waited, or had its turn, it does no more."""
        self._gone.append((name, identity))

    def sweep(self) -> None:
        """From now on: a message that may have to wait is on its way to the pool."""
        self._sweeps = True

    def acknowledge(self, request: HeldBack) -> None:
        """Acknowledge this message once it holds its lock or is parked."""
        self._unacknowledged.append(request)

    def _run(self) -> None:
        buckets = itertools.cycle(range(BUCKETS))
        per_tick = round(BUCKETS * TICK / ROUND)
        while self._goes_on():
            sweeps = self._sweeps
            try:
                self._acknowledge_arrived()  # first: it needs no store
                self._look_for_unheard()
                if not sweeps:
                    self._look()
                self._tick(list(itertools.islice(buckets, per_tick)) if sweeps else [])
                self._failing = False
            except StoreUnavailable as error:
                # Without queues it was a rare look, and others tell that the store is away.
                if sweeps and not self._failing:
                    logger.warning("queues are not looked after: %s", error)
                self._failing = sweeps
            except Exception:
                logger.exception("looking after queues failed in one round and goes on")
            time.sleep(TICK)
        self._drop_connection()
        self._store.close()

    def _look(self) -> None:
        now = self._runtime.clock.monotonic()
        if now >= self._next_look:
            self._next_look = now + AGAIN
            if self._store.due(self._runtime.settings.prefix, range(BUCKETS), 1, EVER):
                self._sweeps = True
            self._next_look = now + LOOK

    def _tick(self, buckets: list[int]) -> None:
        self._do_what_is_left_to_it()
        settings = self._runtime.settings
        for name in self._store.due(settings.prefix, buckets, MOST) if buckets else ():
            keys = LockKeys.of(settings.prefix, name)
            turn_ms = round(settings.turn * 1000)
            taken = self._store.sweep(keys, uuid.uuid4().hex, turn_ms, settings.turn_tries)
            if taken.buried:
                logger.error(
                    "%s: a message lost its turn %d times and is among the dead letters of %s",
                    name, settings.turn_tries, keys.dead(),
                )  # fmt: skip
            self._handover.carry(name, taken.granted)
            self._do_what_is_left_to_it()  # a broker may be slow, and the due may be many

    def _do_what_is_left_to_it(self) -> None:
        self._acknowledge_arrived()
        for name, identity in self._revoked():
            self._handover.take_out(name, identity, "revoked while it waited")
        while self._gone:
            name, identity = self._gone.popleft()
            self._handover.take_out(name, identity)
        while self._grants:
            self._handover.carry(*self._grants.popleft())

    def _acknowledge_arrived(self) -> None:
        for _ in range(len(self._unacknowledged)):
            request = self._unacknowledged.popleft()
            if self._runtime.arrivals.has(request.dlock_number):
                self._soon(request.dlock_acknowledge)
            elif not request.acknowledged:
                self._unacknowledged.append(request)

    @contextmanager
    def _producer(self) -> Iterator[Any]:
        """A connection of this thread's own: the app's pool may be a greenlet's, or be empty."""
        app = self._runtime.app
        if self._connection is None:
            self._connection = app.connection_for_write()
        try:
            yield app.amqp.Producer(self._connection, auto_declare=False)
        except BaseException:
            self._drop_connection()
            raise

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()
