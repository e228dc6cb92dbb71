"""Celery signals and monitor events, made from the events of :mod:`.locking.events`.

A receiver gets ``sender`` (the task, or None for a ``Lock`` outside of tasks) and ``event``. It runs in the process
that found the fact: the pool child, or for a lost lease also the worker's main process. Monitor events are named
``dlock-<kind>``, because an event named ``task-...`` would change the task's state in every monitor.

A new kind of event needs an entry in ``Kind`` (:mod:`.locking.events`), a signal here, and a caller of
``Listeners.emit``. Its monitor event follows from the kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from celery.utils.dispatch import Signal

from .locking.events import Event, Kind, Listeners

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

__all__ = [
    "feed",
    "lock_acquired",
    "lock_bypassed",
    "lock_lost",
    "lock_misfired",
    "lock_operator",
    "lock_queued",
    "lock_refused",
    "lock_released",
    "lock_skipped",
]

_ARGS: Final = ["event"]

#: A lock was acquired.
lock_acquired = Signal(name="lock_acquired", providing_args=_ARGS)
#: Another owner holds the lock; ``event.reason`` names it. The policy decides what the call does.
lock_refused = Signal(name="lock_refused", providing_args=_ARGS)
#: A lock was released.
lock_released = Signal(name="lock_released", providing_args=_ARGS)
#: A lease ended before its holder released it: another call may run at the same time.
lock_lost = Signal(name="lock_lost", providing_args=_ARGS)
#: A call ended without running its body.
lock_skipped = Signal(name="lock_skipped", providing_args=_ARGS)
#: A call was parked in the queue until it gets the lock.
lock_queued = Signal(name="lock_queued", providing_args=_ARGS)
#: A body runs without its lock, because the store is unavailable (``on_store_error="run"`` or ``"local"``). With
#: ``"local"``, ``event.local`` is True: the body holds its lock on this machine.
lock_bypassed = Signal(name="lock_bypassed", providing_args=_ARGS)
#: A tick came too late and does not run (``misfire_grace``). ``lock_skipped`` is sent for it, too.
lock_misfired = Signal(name="lock_misfired", providing_args=_ARGS)
#: An operator acted on a lock name; ``event.owner`` is ``user@host``, and ``event.reason`` is the action.
lock_operator = Signal(name="lock_operator", providing_args=_ARGS)

_SIGNALS: Final[dict[Kind, Signal]] = {
    "acquired": lock_acquired,
    "refused": lock_refused,
    "released": lock_released,
    "lost": lock_lost,
    "skipped": lock_skipped,
    "queued": lock_queued,
    "bypassed": lock_bypassed,
    "misfired": lock_misfired,
    "operator": lock_operator,
}


def feed(listeners: Listeners, app: Celery, monitored_as: Callable[[Kind | None], str | None]) -> None:
    """Send signals, and monitor events while the worker sends events, for each event of ``listeners``.

    Args:
        listeners: The source of the events.
        app: The app whose broker carries the monitor events.
        monitored_as: Returns the name under which the worker sends events of a kind; None while it sends none.
    """

    def tell(event: Event) -> None:
        # The monitor event comes first: a receiver may raise SystemExit, which leaves `send`. And a broker that is away
        # takes no event from the receivers.
        try:
            if (node := monitored_as(event.kind)) is not None:
                send_monitor_event(event, node)
        finally:
            sender = app.tasks.get(event.task) if event.task else None
            _SIGNALS[event.kind].send(sender=sender, event=event)

    def send_monitor_event(event: Event, node: str) -> None:
        facts = ("name", "owner", "token", "reason", *(("local",) if event.kind == "bypassed" else ()))
        with app.events.default_dispatcher(hostname=node) as dispatcher:
            dispatcher.send(f"dlock-{event.kind}", uuid=event.task_id, **{fact: getattr(event, fact) for fact in facts})

    # One filter for both, because each run of a task asks it twice.
    listeners.add(tell, lambda kind: _SIGNALS[kind].receivers or monitored_as(kind))
