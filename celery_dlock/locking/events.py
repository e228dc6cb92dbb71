"""Events of locks, and the listeners that receive them.

:mod:`celery_dlock.signals` adds the listeners that send Celery signals and monitor events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, NamedTuple

from ..utils import threads
from ..utils.log import logger
from .recent_losses import RecentLosses

__all__ = ["FORGOTTEN", "MAX_HOLD_OVER", "Event", "Kind", "Listeners", "Loss", "LossCause", "unanswered"]


class LossCause(Enum):
    """Why a lease ended before its release. The values are those of the metric's label ``cause``."""

    FORGOTTEN = "forgotten"
    UNANSWERED = "unanswered"
    MAX_HOLD = "max_hold"
    TIME_LIMIT = "time_limit"


class Loss(NamedTuple):
    """The reason of a loss.

    Args:
        cause: The cause.
        text: The reason as text for people.
    """

    cause: LossCause
    text: str


FORGOTTEN: Final = Loss(LossCause.FORGOTTEN, "the store no longer knows it")
MAX_HOLD_OVER: Final = Loss(LossCause.MAX_HOLD, "it was held for as long as max_hold allows")


def unanswered(reason: object) -> Loss:
    """Return the loss of a lease that the store did not renew for this reason."""
    return Loss(LossCause.UNANSWERED, f"no renewal was confirmed before its deadline: {reason}")


Kind = Literal["acquired", "refused", "released", "lost", "skipped", "queued", "bypassed", "misfired", "operator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of one lock. It never contains task arguments, which may be secrets.

    Args:
        kind: The kind of event: the name of its signal without ``lock_``.
        name: The lock name.
        owner: The id of the owner that acquired or requested the lock: one delivery of a message, or one thread.
        task: The task's name; None for a ``Lock`` outside any task, or if the watchdog does not know it.
        task_id: The id of the task that requested or held the lock; None in the same cases.
        token: The fencing token; None if the lock was not acquired, or if the watchdog reports its loss.
        reason: A text for operators: the holder, the cause of a loss, or what the policy did; may be empty.
        local: Of ``bypassed``: the body holds its lock on this machine (``on_store_error="local"``).
    """

    kind: Kind
    name: str
    owner: str
    task: str | None = None
    task_id: str | None = None
    token: int | None = None
    reason: str = ""
    local: bool = False


class Listeners:
    """The receivers of events.

    An error of a listener is logged and does not affect the lock. Only an exception that ends the thread or greenlet
    reaches the caller.
    """

    def __init__(self) -> None:
        self._listeners: list[tuple[Callable[[Kind], object], Callable[[Event], None]]] = []
        #: Returns a true value if a listener accepts this kind of event now.
        self.want: Callable[[Kind], object] = lambda kind: False
        #: Called at the release of a lease that was lost before, with its lock name and owner.
        self.after_loss: Callable[[str, str], object] = lambda name, owner: None
        #: Shared with the pool children that are forked later.
        self.losses = RecentLosses()

    def add(self, listener: Callable[[Event], None], hears: Callable[[Kind], object] = lambda kind: True) -> None:
        """Add a listener.

        Args:
            listener: Called with each event of an accepted kind, in the thread that emits it.
            hears: Returns a true value if the listener accepts a kind now. Called for each event; must not raise. By
                default, the listener accepts all kinds.
        """
        self._listeners.append((hears, listener))
        self._set_want()

    def remove(self, listener: Callable[[Event], None]) -> None:
        """Remove a listener that was added."""
        del self._listeners[[added for _, added in self._listeners].index(listener)]
        self._set_want()

    def _set_want(self) -> None:
        filters = [hears for hears, _ in self._listeners]
        # Each run of a task asks twice, and mostly there is one listener: that of the signals and monitor events.
        self.want = filters[0] if len(filters) == 1 else lambda kind: any(hears(kind) for hears in filters)

    def emit(self, kind: Kind, **facts: Any) -> None:
        """Send an event to the listeners that accept its kind.

        Args:
            kind: The kind of event.
            facts: The other fields of the :class:`Event`.
        """
        if kind == "lost":
            self.losses.add()
        event = None
        for hears, listener in self._listeners:
            if not hears(kind):
                continue
            try:
                event = event or Event(kind=kind, **facts)
                listener(event)
            except BaseException as error:
                # In the thread of a body, SystemExit and similar exceptions must reach the code that runs the body. In
                # a background thread they are only logged: they would end the thread.
                if threads.is_kill(error) or not (isinstance(error, Exception) or threads.in_background()):
                    raise
                logger.warning("a listener of dlock-%s failed", kind, exc_info=True)
