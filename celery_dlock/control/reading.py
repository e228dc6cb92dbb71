"""The reading half of ``LockControl``."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from ..errors import InvalidLockOptions
from ..keys.lock_name import UNKNOWN_SEATS, LockName, name_from_text
from ..options.error_texts import invalid_value
from ..runtime import Runtime
from ..store.factory import open_operator_store
from ..store.operator import Place
from ..store.operator_model import (
    STATES,
    ClaimView,
    DeadLetter,
    LockView,
    Page,
    RunView,
    State,
    Waiter,
    Waiting,
)
from . import explanation, summary
from . import ticks as schedule
from . import workers as remote

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Self

    from ..store.operator import OperatorStore

__all__ = ["LIMIT", "LockReader"]

T = TypeVar("T")

#: The items of a page or list, if the caller names no limit.
LIMIT = 100


class LockReader:
    """The methods of :class:`~celery_dlock.control.LockControl` that only read."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._runtime = Runtime.of(app)
        settings = self._runtime.settings
        self._store: OperatorStore = open_operator_store(
            settings.locations, timeout=settings.timeout, prefix=settings.prefix
        )

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
        states = _states(state)

        def accepted(view: LockView) -> bool:
            by = (one.task for one in (view.holder, view.run, view.claim) if one)
            if task is not None and task not in by:
                return False
            return older_than is None or view.at - view.since > older_than

        return self._store.scan(states, cursor, limit, _matcher(name), accepted)

    def all_locks(
        self, *, task: str | None = None, name: str | None = None, state: State | Iterable[State] | None = None
    ) -> Iterator[LockView]:
        """Yield the lock names of all pages of :meth:`locks`. A name may come twice."""
        page = self.locks(task=task, name=name, state=state, limit=1000)
        yield from page.items
        while page.cursor:
            page = self.locks(task=task, name=name, state=state, cursor=page.cursor, limit=1000)
            yield from page.items

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

    def queues(self, *, after: str = "", limit: int = LIMIT, each: int = 20) -> tuple[Waiting, ...]:
        """Return the locks that have waiters, each with the first of them. They are in a fixed order.

        Args:
            after: Only locks behind this lock name: the last one of the page before.
            limit: The highest number of locks.
            each: The highest number of waiters of each lock.

        Raises:
            LockKeyError: ``after`` is no lock name.
        """
        place = Place.of(name_from_text(after)) if after else None
        found = (self._store.list_waiters(name, each) for name in self._store.queues(place))
        return tuple(islice((queue for queue in found if queue.count), limit))

    def dead_letters(
        self,
        name: str | None = None,
        *,
        task: str | None = None,
        limit: int = 1000,
        after: tuple[str, str] | None = None,
    ) -> tuple[DeadLetter, ...]:
        """Return the dead letters of all locks, or of one lock or task, in a fixed order.

        It reads an index, and scans nothing.

        Args:
            name: The lock name.
            task: The name of the task.
            limit: The highest number of dead letters.
            after: Only those behind this one: ``name`` and ``identity`` of the last one of the page before.

        Raises:
            LockKeyError: ``after`` has no lock name.
        """
        return _some(self._store.dead_letters(_place(after)), limit, name, task)

    def unknown_outcomes(
        self,
        name: str | None = None,
        *,
        task: str | None = None,
        limit: int = 1000,
        after: tuple[str, str] | None = None,
    ) -> tuple[RunView, ...]:
        """Return the runs whose process died in the body (``once_per``), in a fixed order.

        It reads an index, and scans nothing.

        Args:
            name: The lock name.
            task: The name of the task.
            limit: The highest number of runs.
            after: Only those behind this one: ``name`` and ``tick`` of the last one of the page before.

        Raises:
            LockKeyError: ``after`` has no lock name.
        """
        unknown = (run for run in self._store.unsettled_runs(_place(after)) if run.state == "unknown")
        return _some(unknown, limit, name, task)

    def claims(self, *, task: str | None = None, cursor: str = "", limit: int = LIMIT) -> Page[ClaimView]:
        """Return a page of the claims of published messages (``unique``), as :meth:`locks` does for names."""
        page = self.locks(task=task, state="claimed", cursor=cursor, limit=limit)
        return Page([view.claim for view in page.items if view.claim], page.cursor, page.scanned, page.keys)

    def explain(self, task_id: str) -> explanation.Explanation:
        """Return what became of a call: its result, and every place of the store in which it is.

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
        return summary.health(self._store, [place.shown for place in self._runtime.settings.locations])

    def workers(self, *, timeout: float = 1.0) -> remote.Workers:
        """Ask the live workers which locks they hold, and how their watchdogs are. Raises no error.

        This uses Celery's remote control, and does not ask the store. If no worker can be asked or none answers,
        ``problem`` is the reason.

        Args:
            timeout: Seconds to wait for answers. The call always takes this long: it does not know the number of
                workers, so it cannot tell when all have answered.
        """
        return remote.ask_workers(self._app, timeout)

    def close(self) -> None:
        """Close the connections. The object may be used again afterwards."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _place(after: tuple[str, str] | None) -> Place | None:
    return None if after is None else Place.of(name_from_text(after[0]), after[1])


def _some(found: Iterable[_Named], limit: int, name: str | None, task: str | None) -> tuple[_Named, ...]:
    wanted = (one for one in found if (name is None or one.name == name) and (task is None or one.task == task))
    return tuple(islice(wanted, limit))


_Named = TypeVar("_Named", DeadLetter, RunView)
