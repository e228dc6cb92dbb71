"""The log, also for threads that must not touch it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from . import threads as native
from .fork_guard import no_fork

__all__ = ["log_fields", "logger"]

_near = logging.getLogger("celery_dlock")
#: The logger's methods that make a record.
_CALLS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})


class _GreenletLogAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 has no arguments for it
    """Has a thread of its own write each record, in their order; beside greenlets, one of them.

    A handler that blocks, such as one whose pipe is full, would stop renewals. And its lock is shared with greenlets.
    """

    def __init__(self) -> None:
        super().__init__(_near, {})
        self._errands: dict[int, native.SerialExecutor] = {}  # by process: a fork may come while one is done

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("exc_info"):
            kwargs["exc_info"] = sys.exc_info()
        errands = self._errands.get(os.getpid()) or self._errands.setdefault(os.getpid(), native.SerialExecutor())
        errands.add(partial(_written, _near.log, level, msg, *args, **kwargs))


def _written(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # A handler may have locks that logging does not renew in a child: its queue's, for example.
    with no_fork():
        log(*args, **kwargs)


def _unraised(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Log from a background thread, which a handler or a filter that raises must not end."""
    try:
        log(*args, stacklevel=3, **kwargs)
    except BaseException as error:
        if native.is_kill(error):
            raise
        native.report(f"a log handler or filter failed at {args!r}", error)


class _ThreadAwareLogger:
    def __init__(self) -> None:
        self._from_afar = _GreenletLogAdapter()

    def __getattr__(self, name: str) -> Any:
        afar = native.is_native_thread()
        found = getattr(self._from_afar if afar else _near, name)
        if name not in _CALLS or not native.in_background():
            return found
        return partial(_unraised, found if afar else partial(_written, found))


#: What every room of ours logs with.
logger = cast("logging.Logger", _ThreadAwareLogger())


def log_fields(task_name: str | None = None, task_id: str | None = None, lock_name: str = "") -> dict[str, str | None]:
    """Return the ``extra`` of a log line about a task: attributes of the record, for formatters and filters.

    Celery's own ``%(task_name)s`` and ``%(task_id)s`` read the same attributes.
    """
    return {"task_name": task_name, "task_id": task_id, "lock_name": lock_name}
