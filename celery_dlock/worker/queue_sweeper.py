"""The queue sweeper: a thread of each worker that publishes granted messages which no other process publishes.

These are the grants that follow a dead holder, a failed hand-off or a dead waiter.

Longer than 300 lines: one thread and one connection carry out all of this, in a fixed order.
"""

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
from ..utils.log import log_fields, logger
from ..utils.rng import rng

__all__ = ["QueueSweeper"]


#: Seconds between two rounds, in which it does what the worker has left to it.
TICK: Final = 0.1
#: Seconds between two sweeps of the worker that has the sweep lease, if nothing is due. In a Cluster, a sweep takes a
#: command for each bucket. MOST is the number of locks of one bucket that one round sweeps.
ROUND: Final = 0.5
ROUND_OF_CLUSTER: Final = 1.0
MOST: Final = 100
#: SPARE: seconds that the sweep lease outlives the next sweep. LATE: within so many seconds after its end, another
#: worker asks for it. ROUND_OF_CLUSTER, these two and two ticks are less than 2 s. So soon a hand-off follows a death.
SPARE: Final = 0.5
LATE: Final = 0.1
#: Seconds for which a worker leaves the sweep lease to others after its broker did not take a message.
ASIDE: Final = 2.0
#: LOOK: seconds between two looks of a worker without tasks that queue. A call may have chosen to queue, and the worker
#: that parked it may have died. AGAIN: seconds until a look that failed is repeated.
LOOK: Final = 30.0
AGAIN: Final = 2.0
#: Seconds between two notes that workers of this broker run, and the milliseconds that a note lives. A note outlives
#: one publication to a broker that does not answer.
PRESENT_AGAIN: Final = 30.0
PRESENT_MS: Final = 120_000
#: Seconds that a Redis broker has for each answer, unless the app sets a timeout. Without one, kombu waits for ever.
ANSWERS_WITHIN: Final = 10.0
#: A year: longer than any lock with waiters is held.
EVER: Final = 366 * 24 * 3600.0


class HeldBack(Protocol):
    """A delivery whose acknowledgement is held back."""

    @property
    def acknowledged(self) -> bool: ...
    @property
    def dlock_number(self) -> int: ...
    def dlock_acknowledge(self) -> None: ...


class QueueSweeper:
    """Sweeps queues, publishes granted messages, and sends acknowledgements that were held back.

    It is not a part of the watchdog, because a slow broker would cost leases.

    Of all workers of a broker, the one that has the sweep lease in the store sweeps. The lease only saves work. If that
    worker dies or hangs, its lease ends and another worker takes it. If two sweep at once, each sweep is still one
    script.

    Args:
        runtime: The runtime whose queues to sweep.
        revoked: Returns the parked messages that were revoked since its last call.
        soon: Has the worker's consumer call a function: only the consumer's thread may write to its connection.
        goes_on: Called before each round; false ends the thread.
        mark_completed: Writes the done marks of runs whose acknowledgement was lost.
        parks: Whether there are tasks that queue. If not, it sweeps once a call has chosen to queue, or once one of its
            rare looks has found a waiter.
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
        self._store = runtime.open_store(settings.timeout)
        self._publisher = GrantPublisher(
            runtime.app,
            self._store,
            settings.turn,
            self._producer,
            settings.broker,
            runtime.monitored_as,
        )
        # Deques, because append and popleft are atomic. A lock could be held by a signal handler or a greenlet.
        self._grants: collections.deque[tuple[LockName, Grant]] = collections.deque()
        #: The waiters to be taken out: lock name, identity, and the reason ("": the end is stored already).
        self._out: collections.deque[tuple[LockName, str, str]] = collections.deque()
        self._unacknowledged: collections.deque[HeldBack] = collections.deque()
        self._failing = False
        #: The locks that the store refused to sweep in this round, and whether that is in the log already.
        self._refused: list[tuple[LockName, StoreRefused]] = []
        self._refusal_logged = False
        #: Whether a refusal to take out a waiter is in the log already.
        self._removal_refusal_logged = False
        self._next_look = 0.0
        self._next_round = 0.0
        self._next_presence = 0.0
        self._worker = uuid.uuid4().hex
        # In a green pool this is a greenlet: it publishes and stores results, and both take locks that greenlets share.
        self._loop = Loop("queue sweeper", self._turn, close=self._close, begin=begin_thread("queue-sweeper"))

    def start(self) -> None:
        self._loop.start()

    def hand_off(self, name: LockName, grant: Grant) -> None:
        """Publish a granted message in the next round."""
        self._grants.append((name, grant))

    def discard_waiter(self, name: LockName, identity: str) -> None:
        """Take a message that ended before it started out of its queue, in the next round."""
        self._out.append((name, identity, ""))

    def sweep(self) -> None:
        """Sweep from now on: a message that may be parked is about to be passed to the pool."""
        self._sweeps = True

    def acknowledge(self, request: HeldBack) -> None:
        """Acknowledge this message once it holds its lock or is parked."""
        self._unacknowledged.append(request)

    def _turn(self) -> float | None:
        if not self._goes_on():
            return None
        sweeps = self._sweeps
        try:
            self._send_held_acks()  # first: it needs no store
            self._mark_completed()
            if not sweeps:
                self._look()
            self._do_left_work()
            if sweeps:
                self._sweep_due()
        except StoreUnavailable as error:
            # Without queues this was only a rare look, and other threads report the store.
            if sweeps and not self._failing:
                logger.warning("queues are not swept, retrying every %g s: %s", TICK, error)
            self._failing = sweeps
        return TICK

    def _close(self) -> None:
        self._drop_connection()
        self._store.close()

    def _look(self) -> None:
        now = self._runtime.clock.monotonic()
        if now >= self._next_look:
            self._next_look = now + AGAIN
            # Only one worker looks in each period. If it finds a waiter, it begins to sweep.
            if not self._lease_left("look", LOOK) and self._due(1, EVER):
                self._sweeps = True
            self._next_look = now + LOOK

    def _sweep_due(self) -> None:
        """Sweep the locks that are due, unless another worker of this broker does so."""
        now = self._runtime.clock.monotonic()
        if now < self._next_round:
            return
        self._note_presence()
        pause = ROUND_OF_CLUSTER if self._store.clustered else ROUND
        self._next_round = now + pause
        left = self._lease_left("sweep", pause + SPARE)
        if left:
            self._failing = False
            self._next_round = now + left + rng.uniform(0, LATE)
            return
        due = self._due(MOST)
        self._failing = False  # only now: a store that refuses every command refuses this one, too
        swept = [self._sweep(name) for name in due if not self._publisher.left_to_others(name)]
        self._log_refused()
        if False in swept:
            # Another worker may reach the broker.
            self._next_round = self._runtime.clock.monotonic() + ASIDE
        elif True in swept:
            self._next_round = now  # more may be due

    def _log_refused(self) -> None:
        """Log a refusal once, and not again in each round."""
        refused, self._refused = self._refused, []
        if refused and not self._refusal_logged:
            name, error = refused[0]
            others = f" and {len(refused) - 1} others" if refused[1:] else ""
            logger.error(
                "%s%s: the waiters are not granted the lock, retrying: %s", name, others, error,
                extra=log_fields(lock_name=name.text),
            )  # fmt: skip
        self._refusal_logged = bool(refused)

    def _note_presence(self) -> None:
        """Store that this broker has workers: while it does not answer, its messages must not become dead letters."""
        now = self._runtime.clock.monotonic()
        if now >= self._next_presence:
            self._next_presence = now + PRESENT_AGAIN
            with suppress(StoreUnavailable):
                self._store.announce_workers(self._publisher.broker, PRESENT_MS)

    def _lease_left(self, duty: str, seconds: float) -> float:
        """Seconds until the lease of another worker ends; 0 if this one has it now, or if it cannot be taken.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        broker = self._publisher.broker
        try:
            return self._store.sweep_lease(broker, duty, self._worker, round(seconds * 1000)) / 1000
        except StoreUnavailable as error:
            # The lease only saves work. A full server, or one node of a Cluster, must not stop all sweeps.
            if not isinstance(error, StoreRefused) and not self._store.clustered:
                raise
            return 0.0

    def _due(self, most: int, within: float = 0.0) -> list[LockName]:
        return self._store.list_due_queues(range(BUCKETS), most, within)

    def _sweep(self, name: LockName) -> bool | None:
        """Sweep one lock, and publish what that grants.

        Return False if the broker did not take it, None if the store refused to sweep this lock.
        """
        settings = self._runtime.settings
        try:
            taken = self._store.sweep(name, uuid.uuid4().hex, round(settings.turn * 1000), settings.turn_tries)
        except StoreRefused as error:
            # A key of this lock may have been overwritten. The other queues are swept all the same.
            self._refused.append((name, error))
            return None
        if taken.foreign_broker:
            logger.error(
                "%s: no worker published a message of another broker in %d s, so it is among the dead letters of %s; "
                "action required: if both brokers are one, set dlock_broker; then publish the message again",
                name, FOREIGN_MS / 1000, self._store.dead_letters_at(name),
            )  # fmt: skip
        elif taken.dead_letter:
            logger.error(
                "%s: a message was granted %d times and not started, so it is among the dead letters of %s; "
                "action required: publish it again",
                name, settings.turn_tries, self._store.dead_letters_at(name),
            )  # fmt: skip
        published = self._publisher.publish_next(name, taken.granted)
        self._note_presence()
        self._do_left_work()  # before the next lock, because the broker may be slow and many locks may be due
        return published

    def _do_left_work(self) -> None:
        self._send_held_acks()
        # Kept first: an error at one waiter must not drop the others.
        self._out.extend((name, identity, "revoked while it waited") for name, identity in self._revoked())
        self._take_out()
        while self._grants:
            self._publisher.publish_next(*self._grants.popleft())
            self._note_presence()

    def _take_out(self) -> None:
        for _ in range(len(self._out)):
            waiter = self._out.popleft()
            try:
                self._publisher.remove_waiter(*waiter)
            except StoreUnavailable as error:
                # The waiter may still be queued. In the next round it comes last: other locks may be on other servers.
                self._out.append(waiter)
                if isinstance(error, StoreRefused) and not self._removal_refusal_logged:
                    self._removal_refusal_logged = True
                    logger.warning(
                        "%s: a waiter that has ended is still queued, retrying: %s", waiter[0], error,
                        extra=log_fields(lock_name=waiter[0].text),
                    )  # fmt: skip
                return
            self._removal_refusal_logged = False

    def _send_held_acks(self) -> None:
        for _ in range(len(self._unacknowledged)):
            request = self._unacknowledged.popleft()
            if self._runtime.receive_order.has_recorded(request.dlock_number):
                self._soon(request.dlock_acknowledge)
            elif not request.acknowledged:
                self._unacknowledged.append(request)

    @contextmanager
    def _producer(self) -> Iterator[Any]:
        """Open a connection of this thread's own: the app's pool may belong to greenlets, or be empty."""
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
