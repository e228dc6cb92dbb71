"""What happened to a lock, told to listeners."""

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
    """One fact about one lock. It never holds a task's arguments, which may be secrets.

    Args:
        kind: What happened.
        name: The lock name.
        owner: Whose entry it was.
        task: The task's name; None for a ``Lock`` outside any task.
        task_id: The id of the task that asked or held.
        token: The fencing token, where there was an acquisition.
        reason: For people: who refused, why it was lost, what the policy did.
    """

    kind: Kind
    name: str
    owner: str
    task: str | None = None
    task_id: str | None = None
    token: int | None = None
    reason: str = ""


class Listeners:
    """Whom to tell. A listener that raises is logged and changes nothing: it cannot break a lock."""

    def __init__(self) -> None:
        self._listeners: list[tuple[Callable[[Kind], bool], Callable[[Event], None]]] = []

    def add(self, listener: Callable[[Event], None], hears: Callable[[Kind], bool] = lambda kind: True) -> None:
        """Tell ``listener`` of every event of whose kind ``hears`` is true at that moment; ``hears`` never raises."""
        self._listeners.append((hears, listener))

    def wants(self, kind: Kind) -> bool:
        """Would anybody hear it? To ask first spares the making of facts."""
        for hears, _ in self._listeners:  # not any(): a generator costs more than all it asks  # noqa: SIM110
            if hears(kind):
                return True
        return False

    def emit(self, kind: Kind, **facts: Any) -> None:
        """Tell all who hear; an event that nobody hears costs no more than the asking."""
        event = None
        for hears, listener in self._listeners:
            if not hears(kind):
                continue
            try:
                event = event or Event(kind=kind, **facts)
                listener(event)
            except BaseException as error:
                # In a body's thread, SystemExit and the like are for the body's caller.
                if native.is_kill(error) or not (isinstance(error, Exception) or native.in_background()):
                    raise
                logger.warning("a listener of dlock-%s failed", kind, exc_info=True)
