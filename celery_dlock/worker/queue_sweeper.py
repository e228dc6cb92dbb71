"""The queue sweeper: the worker thread that grants locks and publishes granted messages if no other process does.

It does so if the process of a holder died, if the broker lost a granted message, or if a hand-off failed.
"""

from __future__ import annotations

import collections
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from ..errors import StoreRefused, StoreUnavailable
from ..keys.lock_name import BUCKETS, ONE_LOCK, LockName, task_of_name
from ..messaging.handoff import GrantPublisher
from ..messaging.wire import WIRE_VERSION
from ..store.base import FOREIGN_MS
from ..store.model import Grant
from ..utils.background import Loop, begin_thread
from ..utils.log import log_fields, logger
from ..utils.rng import rng

if TYPE_CHECKING:
    from .delivery_registry import DeliveryRegistry
    from .request import SingletonRequest

__all__ = ["QueueSweeper"]


#: Seconds between two rounds. A round does the work that other threads of the worker left to the sweeper.
ROUND: Final = 0.1
#: Seconds between two sweeps of the worker that has the sweep lease, if nothing is due.
SWEEP_INTERVAL: Final = 0.5
#: The same in a Cluster, where a sweep costs a command for each bucket.
CLUSTER_SWEEP_INTERVAL: Final = 1.0
#: The highest number of locks of one bucket that one sweep visits.
MAX_LOCKS_PER_BUCKET: Final = 100
#: Seconds that the sweep lease lasts beyond the holder's next sweep, which renews it.
LEASE_MARGIN: Final = 0.5
#: When the sweep lease should have ended, each other worker asks for it after a random delay of up to these seconds.
#: If the sweeping worker dies, sweeps resume within CLUSTER_SWEEP_INTERVAL + LEASE_MARGIN + MAX_TAKEOVER_DELAY and two
#: rounds: less than 2 s.
MAX_TAKEOVER_DELAY: Final = 0.1
#: Seconds for which a worker leaves the sweep lease to others after its broker did not take a message.
BROKER_FAILURE_PAUSE: Final = 2.0
#: Seconds after which a worker without tasks under the queue policy checks the store for waiters. A single call may
#: have chosen that policy, and the worker that parked it may have died.
CHECK_INTERVAL: Final = 30.0
#: Seconds after which such a check is repeated if it failed.
CHECK_RETRY_INTERVAL: Final = 2.0
#: Seconds after which a worker records in the store again that its broker has running workers.
PRESENCE_INTERVAL: Final = 30.0
#: Milliseconds that this record lasts. A publication to a broker that does not answer blocks this thread for
#: less time, so the record is renewed before it ends.
PRESENCE_LIFE_MS: Final = 120_000
#: Seconds that a Redis broker has for each answer, unless the app sets a timeout. Without one, kombu waits for ever.
BROKER_TIMEOUT: Final = 10.0
#: The number of debounced calls that a worker remembers between passing them to its pool and their parking.
MAX_DEBOUNCED: Final = 10_000
#: Seconds of a year. Every lock with waiters is due for a sweep within a year, so a check that looks a year
#: ahead finds all of them.
ONE_YEAR: Final = 366 * 24 * 3600.0


class QueueSweeper:
    """Sweeps queues, publishes granted messages, and sends acknowledgements that were held back.

    It is separate from the watchdog. Otherwise a slow broker would delay renewals, and leases would be lost.

    Of all workers of a broker, only the one that has the sweep lease in the store sweeps. If that worker dies or hangs,
    its lease ends and another worker takes it. The lease only saves work. If two workers sweep at once, no harm is
    done: the sweep of a lock is one script.

    Args:
        deliveries: The deliveries of this worker.
        call_in_consumer: Makes the worker's consumer call a function soon. Acknowledgements need that: only the
            consumer's thread may write to its connection.
        keep_running: Called before each round; false ends the thread.
        parks: Whether the app has tasks under the queue policy. If not, sweeps begin when a call chooses that policy,
            or when the check every :data:`CHECK_INTERVAL` seconds finds a waiter.
    """

    def __init__(
        self,
        deliveries: DeliveryRegistry,
        call_in_consumer: Callable[[Callable[[], None]], object],
        keep_running: Callable[[], bool],
        *,
        parks: bool = True,
    ) -> None:
        self._deliveries = deliveries
        self._runtime = runtime = deliveries.runtime
        self._sweeps = parks
        self._call_in_consumer = call_in_consumer
        self._keep_running = keep_running
        self._connection: Any = None
        settings = runtime.settings
        self._store = runtime.open_store(settings.timeout)
        self._publisher = GrantPublisher(
            runtime.app,
            self._store,
            settings.grant_timeout,
            self._producer,
            settings.broker,
            runtime.monitored_as,
            runtime.counts,
            ends_later=True,
        )
        # Deques, because append and popleft are atomic. A lock could deadlock: a signal handler or a greenlet may
        # interrupt the code that holds it.
        self._grants: collections.deque[tuple[LockName, Grant]] = collections.deque()
        #: The waiters to remove from their queues: lock name, identity, and the reason to store in the task's result;
        #: "" if the result is stored already.
        self._waiters_to_remove: collections.deque[tuple[LockName, str, str]] = collections.deque()
        self._unacknowledged: collections.deque[SingletonRequest] = collections.deque()
        #: Debounced calls that were passed to the pool: number in the receive order, lock name, and seconds from the
        #: call's parking until it is due.
        self._debounced: collections.deque[tuple[int, LockName, float]] = collections.deque(maxlen=MAX_DEBOUNCED)
        #: For each lock, the time at which the last debounced call that this worker parked is due.
        self._due_at: dict[LockName, float] = {}
        self._failing = False
        #: The locks that the store refused to sweep in this round, and whether such a refusal was logged already.
        self._refused: list[tuple[LockName, StoreRefused]] = []
        self._refusal_logged = False
        #: Whether a refusal to remove a waiter was logged already.
        self._removal_refusal_logged = False
        self._next_check = 0.0
        self._next_sweep = 0.0
        self._next_presence = 0.0
        self._worker = uuid.uuid4().hex
        # In a green pool this runs as a greenlet: publishing and storing results use locks that the pool's greenlets
        # also take.
        self.loop = Loop(
            "queue sweeper",
            self._run_round,
            goes_on=keep_running,
            close=self._close,
            begin=begin_thread("queue-sweeper"),
        )

    def hand_off(self, name: LockName, grant: Grant) -> None:
        """Publish a granted message in the next round."""
        self._grants.append((name, grant))

    def discard_waiter(self, name: LockName, identity: str) -> None:
        """In the next round, remove a message from its queue, because it ended before it started."""
        self._waiters_to_remove.append((name, identity, ""))

    def start_sweeping(self) -> None:
        """Sweep from now on, because a message that may be parked is about to be passed to the pool."""
        self._sweeps = True

    def sweep_after(self, number: int, name: LockName, seconds: float) -> None:
        """Sweep a lock some seconds after the message with this number in the receive order is parked."""
        self._debounced.append((number, name, seconds))

    def acknowledge(self, request: SingletonRequest) -> None:
        """Acknowledge this message once it holds its lock or is parked."""
        self._unacknowledged.append(request)

    def _run_round(self) -> float:
        sweeps = self._sweeps
        try:
            self._send_held_acks()  # first: it needs no store
            self._deliveries.completion_marker.run_round()
            if not sweeps:
                self._check_for_waiters()
            self._do_left_work()
            if sweeps:
                self._sweep_debounced()
                self._sweep_due()
        except StoreUnavailable as error:
            # If this worker does not sweep, none of its calls waits for this thread, so do not log. Other threads
            # report the error of the store.
            if sweeps and not self._failing:
                logger.warning("queues are not swept, retrying every %g s: %s", ROUND, error)
            self._failing = sweeps
        return ROUND

    def _close(self) -> None:
        self._drop_connection()
        self._publisher.give_up_unended()
        self._store.close()

    def _check_for_waiters(self) -> None:
        """Begin to sweep if the store has waiters. Of all workers of a broker, one checks in each interval."""
        now = self._runtime.clock.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_RETRY_INTERVAL  # if the store raises
            if not self._lease_left(f"look{WIRE_VERSION}", CHECK_INTERVAL) and self._due(1, ONE_YEAR):
                self._sweeps = True
            self._next_check = now + CHECK_INTERVAL

    def _sweep_due(self) -> None:
        """Sweep the locks that are due, unless another worker of this broker does so."""
        now = self._runtime.clock.monotonic()
        if now < self._next_sweep:
            return
        self._note_presence()
        pause = CLUSTER_SWEEP_INTERVAL if self._store.clustered else SWEEP_INTERVAL
        self._next_sweep = now + pause
        # Workers of another wire version sweep besides: they leave each other's messages alone.
        left = self._lease_left(f"sweep{WIRE_VERSION}", pause + LEASE_MARGIN)
        if left:
            self._failing = False
            self._next_sweep = now + left + rng.uniform(0, MAX_TAKEOVER_DELAY)
            return
        due = self._due(MAX_LOCKS_PER_BUCKET)
        self._failing = False  # only now: `_lease_left` returns 0 even if the store refuses every command
        swept = [self._sweep(name) for name in due if not self._publisher.left_to_others(name)]
        self._log_refused()
        if False in swept:
            # Another worker may reach the broker.
            self._next_sweep = self._runtime.clock.monotonic() + BROKER_FAILURE_PAUSE
        elif True in swept:
            self._next_sweep = now  # more may be due

    def _sweep_debounced(self) -> None:
        """Sweep the locks of debounced calls on time. Any other sweep finds them too, but up to two seconds later."""
        now = self._runtime.clock.monotonic()
        for _ in range(len(self._debounced)):
            number, name, seconds = self._debounced.popleft()
            if self._runtime.receive_order.has_recorded(number):
                self._due_at[name] = now + seconds
            else:
                self._debounced.append((number, name, seconds))
        due = [name for name, at in self._due_at.items() if at <= now]
        for name in due:
            del self._due_at[name]
            self._sweep(name)
        if due:
            self._log_refused()

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
        """Record in the store that this broker has running workers, if the record is old.

        Without the record, workers of other brokers would make this broker's messages dead letters while it is down.
        """
        now = self._runtime.clock.monotonic()
        if now >= self._next_presence:
            self._next_presence = now + PRESENCE_INTERVAL
            with suppress(StoreUnavailable):
                self._store.announce_workers(self._publisher.broker, PRESENCE_LIFE_MS)

    def _lease_left(self, duty: str, seconds: float) -> float:
        """Return the seconds until another worker's lease ends; 0 if this worker has it or the store refuses it.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        broker = self._publisher.broker
        try:
            return self._store.sweep_lease(broker, duty, self._worker, round(seconds * 1000)) / 1000
        except StoreUnavailable as error:
            # The lease only saves work. If its server is full, or its node of a Cluster is down, sweep without it.
            if not isinstance(error, StoreRefused) and not self._store.clustered:
                raise
            return 0.0

    def _due(self, most: int, within: float = 0.0) -> list[LockName]:
        return self._store.list_due_queues(range(BUCKETS), most, within)

    def _sweep(self, name: LockName) -> bool | None:
        """Sweep one lock, or all seats of a name (``limit``), and publish what that grants.

        Return False if the broker did not take a message, None if the store refused to sweep this lock.
        """
        granted, published = self._sweep_once(name)
        while granted and published and name.seats != ONE_LOCK and self._keep_running():
            # A sweep grants one seat. More seats may be free: the limit has grown, or several leases have expired.
            granted, published = self._sweep_once(name)
        return published

    def _sweep_once(self, name: LockName) -> tuple[bool, bool | None]:
        """Return whether the sweep granted the lock, and what :meth:`_sweep` returns."""
        settings = self._runtime.settings
        try:
            taken = self._store.sweep(
                name, uuid.uuid4().hex, round(settings.grant_timeout * 1000), settings.grant_attempts
            )
        except StoreRefused as error:
            # A key of this lock may have been overwritten. The other queues are swept all the same.
            self._refused.append((name, error))
            return False, None
        if taken.lost_grant:
            self._runtime.counts.count("lost_grants", task_of_name(name))
        if taken.dead_letter:
            self._runtime.counts.count("dead_letters", task_of_name(name))
        if taken.foreign_broker:
            logger.error(
                "%s: no worker published a message of another broker, or of a newer celery-dlock, in %d s, so it is "
                "among the dead letters of %s; action required: start such a worker, or, if both brokers are one "
                "under two names, set dlock_broker; then publish it again",
                name, FOREIGN_MS / 1000, self._store.dead_letters_at(name),
            )  # fmt: skip
        elif taken.dead_letter:
            logger.error(
                "%s: a message was granted %d times and not started, so it is among the dead letters of %s; "
                "action required: publish it again",
                name, settings.grant_attempts, self._store.dead_letters_at(name),
            )  # fmt: skip
        published = self._publisher.publish_next(name, taken.granted)
        self._note_presence()
        self._do_left_work()  # before the next lock, because the broker may be slow and many locks may be due
        return taken.granted is not None, published

    def _do_left_work(self) -> None:
        self._send_held_acks()
        # Add all revoked waiters to the deque first: `newly_revoked` returns each only once, and a removal may fail.
        revoked = self._deliveries.newly_revoked()
        self._waiters_to_remove.extend((name, identity, "revoked while it waited") for name, identity in revoked)
        self._remove_waiters()
        while self._grants:
            self._publisher.publish_next(*self._grants.popleft())
            self._note_presence()
        self._publisher.store_unended()

    def _remove_waiters(self) -> None:
        for _ in range(len(self._waiters_to_remove)):
            waiter = self._waiters_to_remove.popleft()
            try:
                self._publisher.remove_waiter(*waiter)
            except StoreUnavailable as error:
                # Retry it in the next round, after all others: their locks may be on other servers, which answer.
                self._waiters_to_remove.append(waiter)
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
                self._call_in_consumer(request.dlock_acknowledge)
            elif not request.acknowledged:
                self._unacknowledged.append(request)

    @contextmanager
    def _producer(self) -> Iterator[Any]:
        """Yield a producer on this thread's own connection.

        The app's connection pool may belong to greenlets, or all its connections may be in use.
        """
        app = self._runtime.app
        if self._connection is None:
            connection = app.connection_for_write()
            if connection.transport.driver_type == "redis":
                times = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), BROKER_TIMEOUT)
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
