"""``LockControl``: the locks of an app, as operators see and change them."""

from __future__ import annotations

import fnmatch
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from celery.exceptions import TaskRevokedError

from ..errors import DLockError, InvalidLockOptions
from ..keys.lock_name import UNKNOWN_SEATS, LockName, name_from_text, one_seat
from ..messaging.parked import ParkedMessage
from ..options.durations import seconds_within
from ..options.error_texts import invalid_value
from ..runtime import Runtime
from ..store.acquisition import OPERATOR
from ..store.factory import open_migrator, open_operator_store
from ..store.model import Grant
from ..store.operator import ListCursor
from ..store.operator_model import (
    STATES,
    AuditRecord,
    ClaimView,
    DeadLetter,
    LockView,
    Page,
    RunView,
    State,
    Waiter,
    Waiting,
)
from ..utils.text import printable
from . import explanation, summary
from . import ticks as schedule
from . import workers as remote
from .audit import Audit, current_user
from .scanning import scan_all

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Self

    from ..store.operator import OperatorStore

__all__ = ["ActionRefused", "LockControl"]

#: The items of a page, if the caller names no limit.
LIMIT: Final = 100
#: The shortest and the longest hold, in seconds.
SHORTEST_HOLD, LONGEST_HOLD = 1.0, 366 * 24 * 3600.0
#: Characters of a reason that are stored.
REASON_LENGTH: Final = 500

_REFUSALS: Final = {
    "free": "no acquisition holds it now",
    "other": "another acquisition holds it now; look at it again",
    "granted": "it is granted to a waiter, which is about to start; drop the waiter instead",
    "kept": "it is kept by min_hold, keep_on_retry or an operator; a release by force frees it, and unhold ends a hold",
    "fresh": "its holder is alive: the lease was renewed within half its ttl; a release by force frees it all the same",
}

_Named = TypeVar("_Named", DeadLetter, RunView)
_Listed = TypeVar("_Listed", DeadLetter, RunView, Waiting)


class ActionRefused(DLockError):
    """An action was refused, because the lock name is in another state than the operator expects.

    Args:
        message: The reason, as text for people.
        why: ``"free"``, ``"other"``, ``"granted"``, ``"kept"`` or ``"fresh"``.
    """

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message, why)
        self.message = message
        self.why = why

    def __str__(self) -> str:
        return self.message


class LockControl:
    """The locks of an app: what an operator sees, and may do.

    Every method raises :class:`~celery_dlock.StoreUnavailable` if the store does not answer, or refuses. No method
    returns arguments of a task, except for the text that a ``key`` template shows in the lock name.

    Every action is recorded: in the store (:meth:`audit`), in the log, as the signal ``lock_operator`` and as the
    monitor event ``dlock-operator``.

    A ``LockControl`` may be used by several threads. Close it, or use it in a ``with`` statement.

    Args:
        app: The app whose locks to show.
        user: The operator, for the audit. Default: the user of this process.

    Raises:
        InvalidLockOptions: A ``dlock_`` setting is invalid, or ``dlock_url`` is a list of servers (Redlock).
        NoLockStore: No setting names a store.
    """

    def __init__(self, app: Celery, user: str | None = None) -> None:
        self._app = app
        self._runtime = Runtime.of(app)
        settings = self._runtime.settings
        self._store: OperatorStore = open_operator_store(
            settings.locations, timeout=settings.timeout, prefix=settings.prefix
        )
        self._audit = Audit(app, self._runtime, self._store, user or current_user())

    def close(self) -> None:
        """Close the connections. The object may be used again afterwards."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def table_statements(self, version: int) -> list[str]:
        """Return the statements that make the tables of an SQL store, for a migration of Alembic. Asks no server.

        Args:
            version: The version of the tables. Each needs the version before it.
        """
        settings = self._runtime.settings
        return open_migrator(settings.locations, timeout=settings.timeout).statements(version)

    # -- reading

    def locks(
        self,
        *,
        task: str | None = None,
        name: str | None = None,
        state: State | Iterable[State] | None = None,
        older_than: float | None = None,
        cursor: str = "",
        limit: int = LIMIT,
    ) -> Page[LockView]:
        """Return a page of the lock names that are in use, in no order.

        The keys of the store are scanned step by step, so a page may take seconds, and no other client waits for it.
        A name that is in use from the first page to the last is on at least one of them, and may be on two. Each tick
        of a name (``once_per="tick"``) is an entry of its own.

        Args:
            task: Only names that this task holds, has run or has claimed.
            name: Only names that match this shell pattern, such as ``"shop.*"``.
            state: Only names that are in this state, or in one of these. Default: any.
            older_than: Only names whose holder, last run or claim is older than so many seconds.
            cursor: The ``cursor`` of the page before.
            limit: The page ends after the scan step that reaches this number of names. It may have about twice as many.

        Raises:
            InvalidLockOptions: ``state`` is no state.
            ValueError: ``cursor`` is malformed, or the servers of the store have changed.
        """
        return self._store.scan(_states(state), cursor, limit, _matcher(name), _filter(task, older_than))

    def all_locks(
        self, *, task: str | None = None, name: str | None = None, state: State | Iterable[State] | None = None
    ) -> Iterator[LockView]:
        """Yield the lock names of all pages of :meth:`locks`, each once."""
        return scan_all(self._store, _states(state), _filter(task), _matcher(name))

    def lock(self, name: str) -> LockView:
        """Return what the store knows of a lock name. A free name has no states.

        Raises:
            LockKeyError: The text is no lock name.
        """
        return self._store.describe(name_from_text(name))

    def waiting(self, name: str | None = None, *, limit: int = 1000) -> tuple[Waiter, ...]:
        """Return the waiters of a lock, or of all locks, by lock and then by rank.

        Raises:
            LockKeyError: The text is no lock name.
        """
        names: Iterable[LockName] = self._store.queues() if name is None else [self._named(name)]
        found: list[Waiter] = []
        for one in names:
            found += self._store.list_waiters(one, limit - len(found)).waiters
            if len(found) >= limit:
                break
        return tuple(found)

    def _named(self, name: str) -> LockName:
        """Return the lock name with this text. If it has seats (``limit``), commands look at all of them."""
        found = name_from_text(name)
        return found if self._store.seats(found) == 1 else found._replace(seats=UNKNOWN_SEATS)

    def queues(self, *, cursor: str = "", limit: int = LIMIT, each: int = 20) -> Page[Waiting]:
        """Return a page of the locks that have waiters, each with the first of them. They are in a fixed order.

        Args:
            cursor: The ``cursor`` of the page before.
            limit: The highest number of locks.
            each: The highest number of waiters of each lock.

        Raises:
            LockKeyError: ``cursor`` is malformed.
        """
        found = (self._store.list_waiters(name, each) for name in self._store.queues(_list_cursor(cursor)))
        return _page((queue for queue in found if queue.count), limit, lambda _: "")

    def dead_letters(
        self, name: str | None = None, *, task: str | None = None, cursor: str = "", limit: int = 1000
    ) -> Page[DeadLetter]:
        """Return a page of the dead letters of all locks, or of one lock or task, in a fixed order.

        It reads an index, and scans nothing. A dead letter that was settled since the page before shifts no other one.

        Args:
            name: The lock name.
            task: The name of the task.
            cursor: The ``cursor`` of the page before.
            limit: The highest number of dead letters.

        Raises:
            LockKeyError: ``cursor`` is malformed.
        """
        found = self._store.dead_letters(_list_cursor(cursor))
        return _page(_some(found, name, task), limit, lambda letter: letter.identity)

    def unknown_outcomes(
        self, name: str | None = None, *, task: str | None = None, cursor: str = "", limit: int = 1000
    ) -> Page[RunView]:
        """Return a page of the runs whose process died in the body (``once_per``), as :meth:`dead_letters` does."""
        unknown = (run for run in self._store.unsettled_runs(_list_cursor(cursor)) if run.state == "unknown")
        return _page(_some(unknown, name, task), limit, lambda run: run.tick)

    def claims(self, *, task: str | None = None, cursor: str = "", limit: int = LIMIT) -> Page[ClaimView]:
        """Return a page of the claims of published messages (``unique``), as :meth:`locks` does for names."""
        page = self.locks(task=task, state="claimed", cursor=cursor, limit=limit)
        return Page([view.claim for view in page.items if view.claim], page.cursor, page.scanned, page.keys)

    def explain(self, task_id: str) -> explanation.Explanation:
        """Return what became of a call: its result, and every entry of the store with its id.

        It reads all held locks and claims, so it takes seconds in a store with hundreds of thousands of keys.
        """
        return explanation.explain(self._app, self._store, task_id)

    def counts(self, each: Callable[[LockView], object] = lambda _: None) -> summary.Counts:
        """Return the numbers of locks, waiters, dead letters, unknown outcomes and claims of each task.

        It reads all held locks and claims, as :meth:`explain` does.

        Args:
            each: Called with the view of each of these names.
        """
        return summary.counts(self._store, each)

    def ticks(self, *, recent: int = 3) -> tuple[schedule.TickView, ...]:
        """Return the last ticks of each entry of ``beat_schedule`` whose task has ``once_per="tick"``.

        The due times are computed from the settings of this app. Schedules that a beat reads from elsewhere, such as
        those of a database, are not known here.

        Args:
            recent: The number of ticks of each entry. The newest comes first.
        """
        return tuple(schedule.ticks(self._app, self._store, recent))

    def health(self) -> summary.Health:
        """Return whether the store answers, and what in its setup can lose a lock. Raises no StoreUnavailable."""
        return summary.health(self._store, [one.shown for one in self._runtime.settings.locations])

    def workers(self, *, timeout: float = 1.0) -> remote.Workers:
        """Ask the live workers which locks they hold, and how their watchdogs are. Raises no error.

        This uses Celery's remote control, and does not ask the store. If no worker can be asked or none answers,
        ``problem`` is the reason.

        Args:
            timeout: Seconds to wait for answers. The call always takes this long: it does not know the number of
                workers, so it cannot tell when all have answered.
        """
        return remote.ask_workers(self._app, timeout)

    def audit(self, limit: int = 100) -> list[AuditRecord]:
        """Return the newest actions of all operators, the newest first. The store keeps 1000."""
        return self._audit.records(limit)

    # -- actions

    def release(self, name: str, acquisition: str, *, force: bool = False, reason: str = "") -> None:
        """Release a lock, and grant it to the next waiter.

        The acquisition is that of the :class:`HolderView` that you saw, so this never frees a later holder. A holder
        that is alive learns of it at its next renewal, ``ensure()`` or release; another call may run beside it until
        then.

        Args:
            name: The lock name.
            acquisition: ``holder.acquisition`` of the view.
            force: Also if the lease is fresh (renewed within half its ttl), or the lock is kept on purpose.
            reason: A text for the audit.

        Raises:
            ActionRefused: Another acquisition holds the lock, or none, or ``force`` is needed. Nothing changed.
            LockKeyError: The text is no lock name.
        """
        lock_name = name_from_text(name)
        self._free(lock_name, acquisition, force=force)
        forced = " by force" if force else ""
        self._audit.record("release", name, reason, f"released acquisition {acquisition}{forced}")

    def hold(self, name: str, for_: float, reason: str) -> bool:
        """Hold a lock for a limited time, so that no call runs. Each policy reacts as to any other holder.

        If an execution holds the lock, the hold begins when it releases the lock. If its lease expires without a
        release (its host died), there is no hold: look, and hold again. A granted waiter waits again.

        Args:
            name: The lock name, also of a free lock. All seats of a name with ``limit`` are held.
            for_: Seconds (or a ``timedelta``) from now, from 1 s to 366 days.
            reason: The reason, as skipped calls and waiters report it.

        Returns:
            True if the lock is held now; False if the hold waits for a release. Of a name with ``limit``, True if all
            seats are held now.

        Raises:
            InvalidLockOptions: ``for_`` is out of range, or ``reason`` is empty.
            LockKeyError: The text is no lock name.
        """
        seconds = seconds_within("hold(): for_", for_, SHORTEST_HOLD, LONGEST_HOLD)
        given: object = reason
        if not isinstance(given, str) or not given.strip():
            raise InvalidLockOptions(invalid_value("hold(): reason", reason, "a text that says why"))
        shown = printable(" ".join(reason.split()))[:REASON_LENGTH]
        operator = f"{OPERATOR}{self._audit.user}@{self._audit.host}"
        began = [self._store.hold(lock, operator, round(seconds * 1000), shown) for lock in self._locks(name)]
        held = all(began)
        when = "" if held else ", from the release of the present holder"
        self._audit.record("hold", name, shown, f"held for {seconds:g} s{when}")
        return held

    def unhold(self, name: str, *, hold: str | None = None, reason: str = "") -> bool:
        """End a hold, or cancel one that waits for a release.

        The lock is granted to the next waiter. A ``min_hold`` of the present holder's task is cancelled with the hold.

        Args:
            name: The lock name.
            hold: ``hold`` of the :class:`HolderView` that you saw; None: whichever hold it is.
            reason: A text for the audit.

        Returns:
            False if there is no hold, or not that of ``hold``.

        Raises:
            LockKeyError: The text is no lock name.
        """
        ended = [self._end_hold(lock, hold, reason) for lock in self._locks(name)]
        return any(ended)

    def _end_hold(self, lock_name: LockName, hold: str | None, reason: str) -> bool:
        holder = self._store.describe(lock_name).holder
        if holder is None or not holder.hold or hold not in (None, holder.hold):
            return False
        if holder.kept_by != "operator":
            ended = self._store.cancel_hold(lock_name, holder.acquisition, holder.hold)
        else:
            try:
                self._free(lock_name, holder.acquisition, force=True)
                ended = True
            except ActionRefused:
                ended = False
        if ended:
            self._audit.record("unhold", lock_name.text, reason, f"ended the hold of {holder.operator}")
        return ended

    def _locks(self, name: str) -> list[LockName]:
        """Return the lock of this name, or its seats (``limit``)."""
        found = name_from_text(name)
        return [found, *(one_seat(found, seat) for seat in range(1, self._store.seats(found)))]

    def resolve(self, name: str, *, sent: bool, tick: str = "", mark: str | None = None, reason: str = "") -> bool:
        """Record whether a run of unknown outcome did its work, as ``task.resolve()`` does with arguments.

        Args:
            name: The lock name.
            sent: True: it did its work, and the name counts as used. False: it did not, and the next call runs.
            tick: The digest of the tick, for ``once_per="tick"``.
            mark: ``mark`` of the :class:`RunView` that you saw; None: whichever run it is.
            reason: A text for the audit.

        Returns:
            False if the name has no unknown outcome, or not that of ``mark``.

        Raises:
            InvalidLockOptions: ``sent`` is not a bool.
            LockKeyError: The text is no lock name.
        """
        if not isinstance(sent, bool):
            raise InvalidLockOptions(invalid_value("resolve(): sent", sent, "True or False"))
        lock_name = name_from_text(name)
        run = self._store.describe(lock_name, tick).run
        if run is None or run.state != "unknown" or (mark is not None and run.mark != mark):
            return False
        window_ms = round(self._window(run) * 1000)
        settled = self._store.resolve_run(lock_name, sent=sent, window_ms=window_ms, tick=tick, mark=run.mark)
        if settled:
            did = "did its work" if sent else "did not do its work"
            self._audit.record("resolve", name, reason, f"the run of {run.task}[{run.task_id}] {did}")
        return settled

    def _window(self, run: RunView) -> float:
        """Return the seconds of ``once_per``. If the task is not registered here, the rest of the mark's life."""
        options = getattr(self._app.tasks.get(run.task), "lock_options", None)
        return getattr(options, "once_seconds", None) or max(1.0, run.expires_in)

    def forget(self, name: str, *, tick: str = "", mark: str | None = None, reason: str = "") -> bool:
        """Delete the run mark of a name, so that its next call runs.

        Args:
            name: The lock name.
            tick: The digest of the tick, for ``once_per="tick"``.
            mark: ``mark`` of the :class:`RunView` that you saw; None: whichever run it is.
            reason: A text for the audit.

        Returns:
            False if the name has no run mark, or not that of ``mark``.

        Raises:
            LockKeyError: The text is no lock name.
        """
        lock_name = name_from_text(name)
        if mark == "":  # no run has it
            return False
        forgotten = self._store.forget_run(lock_name, tick, mark or "")
        if forgotten:
            self._audit.record("forget", name, reason, "deleted the run mark")
        return forgotten

    def requeue(self, name: str, identity: str, *, reason: str = "") -> bool:
        """Put a dead letter back into its queue, at its old rank. A worker publishes it when it gets the lock.

        Return False if there is no such dead letter.

        Args:
            name: The lock name.
            identity: ``identity`` of the :class:`DeadLetter`.
            reason: A text for the audit.

        Raises:
            LockKeyError: The text is no lock name.
        """
        queued = self._store.requeue(self._named(name), identity)
        if queued:
            self._audit.record("requeue", name, reason, f"requeued the dead letter {identity}")
        return queued

    def drop(self, name: str, identity: str, *, reason: str = "") -> bool:
        """End a waiter or a dead letter: its result becomes REVOKED, and its message does not run.

        If the call has a stored end, as after the restore of an older store, that end stays.

        The task of the message must be registered in this app. Otherwise its end cannot be stored, and the message
        stays among the dead letters.

        Args:
            name: The lock name.
            identity: ``identity`` of the :class:`Waiter` or :class:`DeadLetter`.
            reason: A text for the audit and for the result.

        Returns:
            False if there is no such message, it runs already, or its end could not be stored (see the log).

        Raises:
            LockKeyError: The text is no lock name.
        """
        lock_name = self._named(name)
        taken = self._store.remove_waiter(lock_name, identity, uuid.uuid4().hex)
        publisher = self._runtime.grant_publisher
        why = f": {printable(reason)}" if reason else ""
        error = TaskRevokedError(f"{name}: dropped by operator {self._audit.user}@{self._audit.host}{why}")
        publisher.publish_next(lock_name, taken.granted)
        ended = bool(taken.entry) and publisher.evict(lock_name, Grant(identity, taken.entry), error, keeps_end=True)
        if taken.entry:
            result = "dropped" if ended else "took out of the queue, but could not store the end of"
            call = ParkedMessage.call_in(taken.entry) or f"the message {identity}"
            self._audit.record("drop", name, reason, f"{result} {call}")
        return ended

    def drop_claim(self, name: str, *, task_id: str | None = None, reason: str = "") -> bool:
        """Delete the claim of a published message, so that another call can be published.

        The message itself stays in the broker, and runs.

        Args:
            name: The lock name.
            task_id: ``task_id`` of the :class:`ClaimView` that you saw; None: whichever claim it is.
            reason: A text for the audit.

        Returns:
            False if the name has no claim, or not that of ``task_id``.

        Raises:
            LockKeyError: The text is no lock name.
        """
        lock_name = name_from_text(name)
        claim = self._store.describe(lock_name).claim
        if claim is None or task_id not in (None, claim.task_id):
            return False
        if not self._store.release_claim(lock_name, claim.task_id, claim.generation):
            return False
        self._audit.record("drop_claim", name, reason, f"deleted the claim of {claim.task}[{claim.task_id}]")
        return True

    def _free(self, name: LockName, acquisition: str, *, force: bool) -> None:
        result, granted = self._store.free(name, acquisition, force=force)
        if result != "freed":
            raise ActionRefused(f"{name} was not released: {_REFUSALS[result]}", result)
        self._runtime.grant_publisher.publish_next(name, granted)


def _states(given: State | Iterable[State] | None) -> tuple[State, ...]:
    if given is None:
        return STATES
    states: tuple[State, ...] = (given,) if isinstance(given, str) else tuple(given)
    for state in states:
        if state not in STATES:
            raise InvalidLockOptions(invalid_value("state", state, f"one of {', '.join(map(repr, STATES))}"))
    return states


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda _: True
    return lambda name: fnmatch.fnmatchcase(name, pattern)


def _filter(task: str | None, older_than: float | None = None) -> Callable[[LockView], bool]:
    def accepted(view: LockView) -> bool:
        if task is not None and task not in (one.task for one in (view.holder, view.run, view.claim) if one):
            return False
        return older_than is None or view.at - view.since > older_than

    return accepted


def _some(found: Iterable[_Named], name: str | None, task: str | None) -> Iterator[_Named]:
    return (one for one in found if name in (None, one.name) and task in (None, one.task))


# The cursor of a list in a fixed order names the page's last entry: its detail, a space and its lock name.


def _page(found: Iterable[_Listed], limit: int, detail: Callable[[_Listed], str]) -> Page[_Listed]:
    items = tuple(islice(found, limit + 1))
    if len(items) <= limit:
        return Page(items)
    last = items[limit - 1]
    return Page(items[:limit], f"{detail(last)} {last.name}")


def _list_cursor(cursor: str) -> ListCursor | None:
    detail, _, name = cursor.partition(" ")
    return ListCursor.of(name_from_text(name), detail) if cursor else None
