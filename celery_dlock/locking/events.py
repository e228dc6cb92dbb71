"""Events of locks, and their listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..utils import threads as native
from ..utils.log import logger

__all__ = ["Event", "Kind", "Listeners"]


Kind = Literal["acquired", "refused", "released", "lost", "skipped", "queued", "bypassed", "misfired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of one lock. It never contains task arguments, which may be secrets.

    Args:
        kind: The kind of event.
        name: The lock name.
        owner: The owner that acquired or requested the lock.
        task: The task's name; None for a ``Lock`` outside any task.
        task_id: The id of the task that requested or held the lock.
        token: The fencing token, if the lock was acquired.
        reason: A text for operators: the holder, the cause of a loss, or what the policy did.
    """

    kind: Kind
    name: str
    owner: str
    task: str | None = None
    task_id: str | None = None
    token: int | None = None
    reason: str = ""


class Listeners:
    """The receivers of events. An error of a listener is logged and does not affect the lock."""

    def __init__(self) -> None:
        self._listeners: list[tuple[Callable[[Kind], bool], Callable[[Event], None]]] = []

    def add(self, listener: Callable[[Event], None], hears: Callable[[Kind], bool] = lambda kind: True) -> None:
        """Call ``listener`` for each event whose kind ``hears`` accepts at that moment. ``hears`` must not raise."""
        self._listeners.append((hears, listener))

    def wants(self, kind: Kind) -> bool:
        """Return whether a listener accepts this kind. A caller that checks first need not collect the fields."""
        for hears, _ in self._listeners:  # not any(): the generator costs more than the calls  # noqa: SIM110
            if hears(kind):
                return True
        return False

    def emit(self, kind: Kind, **facts: Any) -> None:
        """Send an event to the listeners that accept its kind. Without one, no event is created."""
        event = None
        for hears, listener in self._listeners:
            if not hears(kind):
                continue
            try:
                event = event or Event(kind=kind, **facts)
                listener(event)
            except BaseException as error:
                # In the thread of a body, SystemExit and similar exceptions must reach the caller of the body.
                if native.is_kill(error) or not (isinstance(error, Exception) or native.in_background()):
                    raise
                logger.warning("a listener of dlock-%s failed", kind, exc_info=True)
