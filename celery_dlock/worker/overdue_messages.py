"""Returns overdue messages of singleton tasks to their queues, in workers where kombu does not (gevent, eventlet).

Redis keeps the messages that workers have taken and not acknowledged. kombu returns those that are older than the
visibility timeout, by a timer of Celery's event loop. Workers whose pool runs greenlets have no event loop. There,
kombu searches after a poll of 2 s that found nothing to read. But Redis answers ``BRPOP`` each second, so there is no
such poll. The message of a killed worker then waits until another worker starts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..task.base import SingletonTask
from ..utils.background import Loop, begin_thread

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["OverdueMessages", "restore_overdue"]

#: kombu's defaults: seconds of its timer, and at which of its ticks it searches. Before kombu 5.7 they are fixed.
INTERVAL: Final = 10.0
THROTTLE: Final = 10.0
#: Seconds until the next look for a channel, if the worker has none.
AGAIN: Final = 1.0


class OverdueMessages:
    """Searches in its own thread, as often as kombu does in the other pools.

    Args:
        app: The app whose tasks to look for.
        channel: Returns the channel that consumes tasks; None while there is none.
        goes_on: Called before each round; false ends the thread.
    """

    def __init__(self, app: Celery, channel: Callable[[], Any], goes_on: Callable[[], bool]) -> None:
        self._app = app
        self._channel = channel
        self.loop = Loop(
            "search for overdue messages", self._run_round, goes_on=goes_on, begin=begin_thread("overdue-messages")
        )

    def _run_round(self) -> float:
        channel = self._channel()
        if channel is None:
            return AGAIN
        restore_overdue(self._app, channel)
        interval: float = getattr(channel, "unacked_restore_interval", INTERVAL)
        throttle: float = getattr(channel, "unacked_restore_throttle", THROTTLE)
        return (interval if interval > 0 else INTERVAL) * (throttle or 1)


def restore_overdue(app: Celery, channel: Any) -> None:
    """Return the overdue messages of the app's singleton tasks to their queues, once.

    Messages of other tasks stay where they are. Their users may rely on ETAs beyond the visibility timeout, which such
    a worker does not deliver twice.
    """
    if not channel.ack_emulation:
        return  # Redis does not know which messages are unacknowledged
    # A copy, because a new QoS stays registered for the exit of the process.
    search = copy.copy(channel.qos)
    restore = search.restore_by_tag

    def restore_own(tag: bytes, client: Any) -> None:
        kept = client.hget(search.unacked_key, tag)
        if kept is not None and isinstance(app.tasks.get(_task_name(kept)), SingletonTask):
            restore(tag, client)

    search.restore_by_tag = restore_own
    search.restore_visible(num=channel.unacked_restore_limit, interval=1)


def _task_name(kept: bytes) -> str:
    """Return the task's name in a message as kombu keeps it; "" if it has none."""
    try:
        name = json.loads(kept)[0]["headers"]["task"]
    except (ValueError, LookupError, TypeError):
        return ""
    return name if isinstance(name, str) else ""
