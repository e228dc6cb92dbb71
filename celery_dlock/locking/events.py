"""Events of locks, and the listeners that receive them.

:mod:`celery_dlock.signals` adds the listeners that send Celery signals and monitor events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..utils import threads
from ..utils.log import logger

__all__ = ["Event", "Kind", "Listeners"]


Kind = Literal["acquired", "refused", "released", "lost", "skipped", "queued", "bypassed", "misfired"]


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
    """

    kind: Kind
    name: str
    owner: str
    task: str | None = None
    task_id: str | None = None
    token: int | None = None
    reason: str = ""


class Listeners:
    """The receivers of events.

    An error of a listener is logged and does not affect the lock. Only an exception that ends the thread or greenlet
    reaches the caller.
    """

    def __init__(self) -> None:
        self._listeners: list[tuple[Callable[[Kind], bool], Callable[[Event], None]]] = []

    def add(self, listener: Callable[[Event], None], hears: Callable[[Kind], bool] = lambda kind: True) -> None:
        """Add a listener.

        Args:
            listener: Called with each event of an accepted kind, in the thread that emits it.
            hears: Returns whether the listener accepts a kind now. Called for each event; must not raise. By default,
                the listener accepts all kinds.
        """
        self._listeners.append((hears, listener))

    def wants(self, kind: Kind) -> bool:
        """Return whether a listener accepts this kind now. If not, the caller need not collect the event's fields."""
        for hears, _ in self._listeners:  # not any(): the generator costs more than the calls  # noqa: SIM110
            if hears(kind):
                return True
        return False

    def emit(self, kind: Kind, **facts: Any) -> None:
        """Send an event to the listeners that accept its kind.

        Args:
            kind: The kind of event.
            facts: The other fields of the :class:`Event`.
        """
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
