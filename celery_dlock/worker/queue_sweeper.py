"""The thread of a worker that publishes turns nobody else hands over: of dead holders, dead releasers, dead waiters."""

from __future__ import annotations

import collections
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from ..errors import StoreRefused, StoreUnavailable
from ..keys.lock_name import BUCKETS, LockName
from ..messaging.handoff import GrantPublisher
from ..runtime import Runtime
from ..store.base import FOREIGN_MS
from ..store.model import Grant
from ..utils.background import Loop, begin_thread
from ..utils.log import logger
from ..utils.rng import rng

__all__ = ["QueueSweeper"]


#: Seconds between two looks at what the worker leaves to this thread.
TICK: Final = 0.1
#: Seconds between two looks of the worker that has the sweep lease, while nothing is due; in a Cluster a look takes a
#: command for each bucket. And so many locks of one bucket are looked after in one round.
ROUND: Final = 0.5
ROUND_OF_CLUSTER: Final = 1.0
MOST: Final = 100
#: Seconds that the sweep lease outlives the next look; and at most so many pass until another worker asks for it once
#: it has ended. ROUND_OF_CLUSTER, both of these and two ticks are less than 2 s: so soon a hand-over follows a death.
SPARE: Final = 0.5
LATE: Final = 0.1
#: Seconds for which a worker whose broker took no message leaves the sweep lease to others.
ASIDE: Final = 2.0
#: Seconds between two looks of a worker that has no reason to sweep: a call may have chosen to wait, and the worker
#: that knew of it may have died. And until such a look is tried again that was not answered.
LOOK: Final = 30.0
AGAIN: Final = 2.0
#: Seconds between two notes that workers of this broker run, and the milliseconds that such a note lives: longer than
#: one publication takes where the broker does not answer.
PRESENT_AGAIN: Final = 30.0
PRESENT_MS: Final = 120_000
#: Seconds that a Redis broker has for each answer, unless the app says otherwise: kombu would wait for ever.
ANSWERS_WITHIN: Final = 10.0
#: Longer than any lock with waiters is held: a year.
EVER: Final = 366 * 24 * 3600.0


class HeldBack(Protocol):
    """A delivery whose acknowledgement is held back."""

    @property
    def acknowledged(self) -> bool: ...
    @property
    def dlock_number(self) -> int: ...
    def dlock_acknowledge(self) -> None: ...


class QueueSweeper:
    """Sweeps, publishes, and acknowledges what was held back; a broker or a store that hangs holds up nothing else.

    The keeper must not do this: a slow broker would cost leases.

    Args:
        runtime: Whose queues to look after.
        revoked: What was revoked since the last call and may wait.
        soon: Has the worker's consumer call something: only its own thread may write to its connection.
        goes_on: Asked before each tick; false ends the thread.
        mark_completed: Marks what has ended without the broker having heard of it.
        parks: Are there tasks that wait in the store? If not, it sweeps once a call has chosen to, or one of its rare
            looks has found one that waits.

    Of all workers of a broker one looks for what is due: the one that has the sweep lease in the store. It saves work
    only. If that worker dies or hangs, its lease ends and another takes it; if two sweep at once, each sweep is still
    one script.
    """

    def __init__(
        self,
        runtime: Runtime,
        revoked: Callable[[], list[tuple[LockName, str]]],
        soon: Callable[[Callable[[], None]], object],
        goes_on: Callable[[], bool],
        mark_completed: Callable[[], None] = lambda: None,
        *,
        parks: bool = True,
    ) -> None:
        self._runtime = runtime
        self._sweeps = parks
        self._soon = soon
        self._revoked = revoked
        self._goes_on = goes_on
        self._mark_completed = mark_completed
        self._connection: Any = None
        settings = runtime.settings
        self._store = runtime.store(settings.timeout)
        self._handover = GrantPublisher(
            runtime.app,
            self._store,
            settings.turn,
            self._producer,
            settings.broker,
            runtime.monitored_as,
        )
        # Deques: append and popleft are atomic, so no lock that a signal handler or a greenlet could sit on.
        self._grants: collections.deque[tuple[LockName, Grant]] = collections.deque()
        #: Waiters to be taken out: lock name, identity, and why it ends here ("": its end is stored already).
        self._out: collections.deque[tuple[LockName, str, str]] = collections.deque()
        self._unacknowledged: collections.deque[HeldBack] = collections.deque()
        self._failing = False
        #: Locks that the store refused to sweep in this round, and whether it said so of the round before.
        self._refused: list[tuple[LockName, StoreRefused]] = []
        self._told_refused = False
        #: Whether it said so of a waiter to be taken out.
        self._told_out = False
        self._next_look = 0.0
        self._next_round = 0.0
        self._next_note = 0.0
        self._worker = uuid.uuid4().hex
        # Not a real thread beside greenlets: it publishes and stores ends, and both take locks that greenlets share.
        self._loop = Loop("queue sweeper", self._turn, close=self._close, begin=begin_thread("queue-sweeper"))

    def start(self) -> None:
        self._loop.start()

    def hand_off(self, name: LockName, grant: Grant) -> None:
        """Publish a message whose turn it is."""
        self._grants.append((name, grant))

    def discard_waiter(self, name: LockName, identity: str) -> None:
        """A message ended before it started: if it waited, or had its turn, it does no more."""
        self._out.append((name, identity, ""))

    def sweep(self) -> None:
        """From now on: a message that may have to wait is on its way to the pool."""
        self._sweeps = True

    def acknowledge(self, request: HeldBack) -> None:
        """Acknowledge this message once it holds its lock or is parked."""
        self._unacknowledged.append(request)

    def _turn(self) -> float | None:
        if not self._goes_on():
            return None
        sweeps = self._sweeps
        try:
            self._acknowledge_arrived()  # first: it needs no store
            self._mark_completed()
            if not sweeps:
                self._look()
            self._do_what_is_left_to_it()
            if sweeps:
                self._take_part()
        except StoreUnavailable as error:
            # Without queues it was a rare look, and others tell that the store is away.
            if sweeps and not self._failing:
                logger.warning("queues are not looked after: %s", error)
            self._failing = sweeps
        return TICK

    def _close(self) -> None:
        self._drop_connection()
        self._store.close()

    def _look(self) -> None:
        now = self._runtime.clock.monotonic()
        if now >= self._next_look:
            self._next_look = now + AGAIN
            # One worker of all that look so rarely. It begins to sweep if it finds a waiter, and the next one may look.
            if not self._lease_left("look", LOOK) and self._due(1, EVER):
                self._sweeps = True
            self._next_look = now + LOOK

    def _take_part(self) -> None:
        """Look for what is due, unless another worker of this broker does."""
        now = self._runtime.clock.monotonic()
        if now < self._next_round:
            return
        self._note_presence()
        pause = ROUND_OF_CLUSTER if self._store.clustered else ROUND
        self._next_round = now + pause
        left = self._lease_left("sweep", pause + SPARE)
        self._failing = False
        if left:
            self._next_round = now + left + rng.uniform(0, LATE)
            return
        swept = [self._sweep(name) for name in self._due(MOST) if not self._handover.left_to_others(name)]
        self._tell_refused()
        if False in swept:
            # Perhaps another worker reaches the broker.
            self._next_round = self._runtime.clock.monotonic() + ASIDE
        elif True in swept:
            self._next_round = now  # more may be due

    def _tell_refused(self) -> None:
        """Log a refusal once, not in each round that meets it again."""
        refused, self._refused = self._refused, []
        if refused and not self._told_refused:
            name, error = refused[0]
            others = f" and {len(refused) - 1} others" if refused[1:] else ""
            logger.error("%s%s: the waiters are not granted the lock, trying again: %s", name, others, error)
        self._told_refused = bool(refused)

    def _note_presence(self) -> None:
        """Note that this broker has workers, so that its messages become no dead letters while it does not answer."""
        now = self._runtime.clock.monotonic()
        if now >= self._next_note:
            self._next_note = now + PRESENT_AGAIN
            with suppress(StoreUnavailable):
                self._store.announce_workers(self._handover.broker, PRESENT_MS)

    def _lease_left(self, duty: str, seconds: float) -> float:
        """Seconds until the lease of another worker ends; 0 if this one has it now, or if it cannot be taken.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        broker = self._handover.broker
        try:
            return self._store.sweep_lease(broker, duty, self._worker, round(seconds * 1000)) / 1000
        except StoreUnavailable as error:
            # The lease saves work only. A server without memory, or one node of a Cluster, must not stop all sweeps.
            if not isinstance(error, StoreRefused) and not self._store.clustered:
                raise
            return 0.0

    def _due(self, most: int, within: float = 0.0) -> list[LockName]:
        return self._store.due(range(BUCKETS), most, within)

    def _sweep(self, name: LockName) -> bool | None:
        """Sweep one lock, and publish what that grants.

        Return False if the broker did not take it, None if the store refused to sweep this lock.
        """
        settings = self._runtime.settings
        try:
            taken = self._store.sweep(name, uuid.uuid4().hex, round(settings.turn * 1000), settings.turn_tries)
        except StoreRefused as error:
            # Perhaps a key of this lock was overwritten; the queues of the others go on.
            self._refused.append((name, error))
            return None
        if taken.foreign:
            logger.error(
                "%s: no worker published a message of another broker in %d s, so it is among the dead letters of %s; "
                "if that broker is this one under another URL, set dlock_broker and publish the message again",
                name, FOREIGN_MS / 1000, self._store.dead_letters_at(name),
            )  # fmt: skip
        elif taken.buried:
            logger.error(
                "%s: a message lost its turn %d times and is among the dead letters of %s",
                name, settings.turn_tries, self._store.dead_letters_at(name),
            )  # fmt: skip
        published = self._handover.publish_next(name, taken.granted)
        self._note_presence()
        self._do_what_is_left_to_it()  # a broker may be slow, and the due may be many
        return published

    def _do_what_is_left_to_it(self) -> None:
        self._acknowledge_arrived()
        # Noted first: an error at one waiter must not forget the others.
        self._out.extend((name, identity, "revoked while it waited") for name, identity in self._revoked())
        self._take_out()
        while self._grants:
            self._handover.publish_next(*self._grants.popleft())
            self._note_presence()

    def _take_out(self) -> None:
        for _ in range(len(self._out)):
            waiter = self._out.popleft()
            try:
                self._handover.remove_waiter(*waiter)
            except StoreUnavailable as error:
                # It may wait still. The others go first in the next round: another server may keep them.
                self._out.append(waiter)
                if isinstance(error, StoreRefused) and not self._told_out:
                    self._told_out = True
                    logger.warning("%s: a waiter that has ended is still queued, trying again: %s", waiter[0], error)
                return
            self._told_out = False

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
            connection = app.connection_for_write()
            if connection.transport.driver_type == "redis":
                times = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), ANSWERS_WITHIN)
                connection.transport_options = {**times, **(connection.transport_options or {})}
            self._connection = connection
        try:
            yield app.amqp.Producer(self._connection, auto_declare=False)
        except BaseException:
            self._drop_connection()
            raise

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()
