"""Celery signals and monitor events, fed by our events.

Receivers get ``sender`` (the task, or None for a ``Lock`` outside any task) and ``event``. They run where the fact was
found: in the pool child, or, for a lease that was lost, in the worker's main process too. Monitor events are named
``dlock-…``: one that began with ``task-`` would change the task's state in every monitor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from celery.utils.dispatch import Signal

from .locking.events import Event, Kind, Listeners

if TYPE_CHECKING:
    from celery import Celery

__all__ = [
    "feed",
    "lock_acquired",
    "lock_bypassed",
    "lock_lost",
    "lock_misfired",
    "lock_queued",
    "lock_refused",
    "lock_released",
    "lock_skipped",
]

_ARGS: Final = ["event"]

#: A lock was taken.
lock_acquired = Signal(name="lock_acquired", providing_args=_ARGS)
#: A lock was held by another; ``event.reason`` says by whom, and the policy what came of it.
lock_refused = Signal(name="lock_refused", providing_args=_ARGS)
#: A lock was given back.
lock_released = Signal(name="lock_released", providing_args=_ARGS)
#: A lease ended before its holder had released it: another may run beside it.
lock_lost = Signal(name="lock_lost", providing_args=_ARGS)
#: A task was ended without being run.
lock_skipped = Signal(name="lock_skipped", providing_args=_ARGS)
#: A task was parked until its turn comes.
lock_queued = Signal(name="lock_queued", providing_args=_ARGS)
#: A body runs without its lock, because the store did not give it (``on_store_error="run"``).
lock_bypassed = Signal(name="lock_bypassed", providing_args=_ARGS)
#: A tick came too late and is not run (``misfire_grace``); it is told of as skipped, too.
lock_misfired = Signal(name="lock_misfired", providing_args=_ARGS)

_SIGNALS: Final[dict[Kind, Signal]] = {
    "acquired": lock_acquired,
    "refused": lock_refused,
    "released": lock_released,
    "lost": lock_lost,
    "skipped": lock_skipped,
    "queued": lock_queued,
    "bypassed": lock_bypassed,
    "misfired": lock_misfired,
}


class Watched(Protocol):
    """Knows under which name the worker sends monitor events."""

    def monitored_as(self) -> str | None:
        """Return the worker's name; None while it sends no events."""
        ...


def feed(listeners: Listeners, app: Celery, watched: Watched) -> None:
    """Make signals, and monitor events while anybody watches, of what ``listeners`` are told.

    Args:
        listeners: What to hear.
        app: Whose broker carries the events.
        watched: Knows whether anybody watches.
    """

    def signal(event: Event) -> None:
        sender = app.tasks.get(event.task) if event.task else None
        _SIGNALS[event.kind].send(sender=sender, event=event)

    def monitor(event: Event) -> None:
        fields: dict[str, Any] = {
            "name": event.name,
            "owner": event.owner,
            "token": event.token,
            "reason": event.reason,
        }
        with app.events.default_dispatcher(hostname=watched.monitored_as()) as dispatcher:
            dispatcher.send(f"dlock-{event.kind}", uuid=event.task_id, **fields)

    listeners.add(signal, lambda kind: bool(_SIGNALS[kind].receivers))
    listeners.add(monitor, lambda kind: watched.monitored_as() is not None)
