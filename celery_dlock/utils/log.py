"""The logger, also for native threads beside greenlets, which must not call log handlers."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

from billiard.exceptions import SoftTimeLimitExceeded

from . import threads
from .fork_guard import no_fork

__all__ = ["log_fields", "logger"]

_logger = logging.getLogger("celery_dlock")
#: The methods of the logger that create a record.
_CALLS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})

_make_record: Final = _logger.makeRecord


def _record_with_fields(
    name: str, level: int, fn: str, lno: int, msg: object, args: Any, exc_info: Any,
    func: str | None = None, extra: Mapping[str, object] | None = None, sinfo: str | None = None,
) -> logging.LogRecord:  # fmt: skip
    """Make a record and set the fields of ``extra``, also if the record has attributes of these names already.

    An application's record factory may set ``task_id`` and ``task_name``. The logger's own method would then raise
    KeyError, and end the task that logs.
    """
    record = _make_record(name, level, fn, lno, msg, args, exc_info, func, None, sinfo)
    known = vars(record)
    known.update({field: value for field, value in (extra or {}).items() if value or field not in known})
    return record


_logger.makeRecord = _record_with_fields  # type: ignore[method-assign]


class _GreenletLogAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 has no arguments for it
    """Writes records in order, in a thread of its own: in a greenlet, if threads are greenlets.

    A handler that blocks, such as one whose pipe is full, would stop the renewals of the calling thread. Its lock is
    shared with greenlets, so a native thread must not take it.
    """

    def __init__(self) -> None:
        super().__init__(_logger, {})
        self._executors: dict[int, threads.SerialExecutor] = {}  # by process: a child needs its own

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("exc_info"):
            kwargs["exc_info"] = sys.exc_info()
        executor = self._executors.get(os.getpid()) or self._executors.setdefault(os.getpid(), threads.SerialExecutor())
        executor.add(partial(_written, _logger.log, level, msg, *args, **kwargs))


def _written(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # logging does not reset all locks of handlers in a forked child, such as that of a queue.
    with no_fork():
        log(*args, **kwargs)


def _report_failure(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Log from a background thread; report errors of handlers and filters instead of raising them."""
    try:
        log(*args, stacklevel=3, **kwargs)
    except BaseException as error:
        if threads.is_kill(error):
            raise
        threads.report(f"a log handler or filter failed at {args!r}", error)


def _report_error(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Log from a task or a program. The error of a handler or filter must not decide about a call, so report it."""
    try:
        log(*args, **{"stacklevel": 2, **kwargs})
    except Exception as error:
        # These may interrupt the log call: a soft time limit, and what the worker raises in a body to stop it.
        if isinstance(error, SoftTimeLimitExceeded) or type(error).__module__.partition(".")[0] == "celery_dlock":
            raise
        threads.report(f"a log handler or filter failed at {args!r}", error)


class _ThreadAwareLogger:
    def __init__(self) -> None:
        self._adapter = _GreenletLogAdapter()

    def __getattr__(self, name: str) -> Any:
        native = threads.is_native_thread()
        found = getattr(self._adapter if native else _logger, name)
        if name not in _CALLS:
            return found
        if not threads.in_background():
            return partial(_report_error, found)
        return partial(_report_failure, found if native else partial(_written, found))


#: The logger of all modules of this package.
logger = cast("logging.Logger", _ThreadAwareLogger())


def log_fields(task_name: str | None = None, task_id: str | None = None, lock_name: str = "") -> dict[str, str | None]:
    """Return the ``extra`` of a log line about a task: attributes of the record, for formatters and filters.

    Celery's own ``%(task_name)s`` and ``%(task_id)s`` read the same attributes.
    """
    return {"task_name": task_name, "task_id": task_id, "lock_name": lock_name}
