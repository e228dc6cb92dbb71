"""Wrappers around the methods that Celery calls on a task instance. Each one calls the :class:`Execution`.

A run ends in ``after_return`` or in the tracer. An eager run ends in ``after_return`` or in the eager call. The first
of these exit hooks releases the lock. If the process dies before, the watchdog does. The tracer is needed because
Celery calls ``after_return`` for success and failure only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery import Task
from celery.app.trace import TraceInfo, report_internal_error, trace_ok_t
from celery.exceptions import Reject
from celery.result import EagerResult
from celery.states import FAILURE, IGNORED, REJECTED, SUCCESS

from .execution import Execution, current, running
from .outcomes import HandledElsewhere, SelfReplaced, Skipped

if TYPE_CHECKING:
    from .base import SingletonTask

__all__ = ["announce_end", "trace_eagerly", "wrap_after_return", "wrap_before_start", "wrap_body", "wrap_tracer"]


class _Ending(NamedTuple):
    """The end of a run: the arguments of :meth:`Execution.finish`."""

    final: bool
    success: bool = False
    died: bool = False
    copies_end: bool = True


_SUCCEEDED: Final = _Ending(final=True, success=True)
_FAILED: Final = _Ending(final=False)
_DIED: Final = _Ending(final=False, died=True)


def wrap_before_start(task: SingletonTask, before_start: Callable[..., None]) -> Callable[..., None]:
    """Acquire the lock, then call the task's own ``before_start`` unless the body is skipped."""
    has_own = not _is_celerys(before_start)

    @functools.wraps(before_start)
    def acquire_first(task_id: str, args: Any, kwargs: Any) -> None:
        run = Execution(task)
        run.begin(args, kwargs)
        if has_own and not run.skipped:
            before_start(task_id, args, kwargs)
        run.body_is_next = True

    return acquire_first


def wrap_body(task: SingletonTask, body: Callable[..., Any]) -> Callable[..., Any]:
    """Run the body under the run's lease. Outside a run, call it unchanged."""

    @functools.wraps(body)
    def run_under_lease(*args: Any, **kwargs: Any) -> Any:
        # If Celery's tracer calls the body, ``running()`` finds the run. Reading ``task.request`` would be slower.
        run = running()
        if run is None or not run.body_is_next or run.task is not task:
            run = current(task.request)  # a direct call, or a body that calls itself
        return body(*args, **kwargs) if run is None else run.body(body, args, kwargs)

    return run_under_lease


def wrap_after_return(task: SingletonTask, after_return: Callable[..., None]) -> Callable[..., None]:
    """Call the task's own ``after_return``, then release everything that the run acquired."""
    has_own = not _is_celerys(after_return)

    @functools.wraps(after_return)
    def release_last(status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        # After a hard time limit, Celery calls this in the main process while the child's body still runs.
        # The main process has no request and no run, so nothing is released there.
        run = running()
        if run is None or run.task is not task or run.identity.task_id != task_id:
            run = current(task.request)  # user code called this: for another task, or outside the run's context
        try:
            if has_own:
                after_return(status, retval, task_id, args, kwargs, einfo)
        finally:
            if run is not None:
                run.finish(
                    final=True,
                    success=status == SUCCESS and not run.skipped,
                    copies_end=status != FAILURE or not _rejects_failures(task),
                )

    return release_last


def wrap_tracer(task: Task[..., Any], tracer: Callable[..., Any]) -> Callable[..., Any]:
    """Release in the tracer what ``after_return`` did not: it is not called on retry, ignore, reject and terminate."""

    def trace(*args: Any, **kwargs: Any) -> Any:
        before, ending = running(), _DIED
        try:
            result = tracer(*args, **kwargs)
            ending = _SUCCEEDED if result.info is None else _ending_of(result.info)
        except (MemoryError, Reject):
            ending = _FAILED
            raise
        except Exception as error:  # noqa: BLE001  # the tracer fails on malformed callbacks in the message
            ending = _FAILED
            # Return what Celery's slow path returns. Only a prefork pool reports a raised error to the main process.
            # A pool of threads or greenlets would never acknowledge the message, and a solo worker would end.
            result = trace_ok_t(report_internal_error(task, error), TraceInfo(FAILURE, error), 0.0, None)
        finally:
            try:
                # Most runs are released by now: ``after_return`` did it.
                if running() is not before:
                    _release_pending_run(before, ending)
            except BaseException:
                # No exit hook follows while the process lives, so an exception here must not leave the lock unreleased.
                _release_pending_run(before, ending)
                raise
        return result

    return trace


def _is_celerys(method: Any) -> bool:
    """Return whether this is the empty method of Celery's own task class, which need not be called.

    A tracing library may have wrapped that method under its name. Then it has to be called.
    """
    return bool(method.__module__ == Task.__module__ and not hasattr(method, "__wrapped__"))


def _ending_of(info: TraceInfo) -> _Ending:
    """Return the ending of a run that raised."""
    # Only after Reject(requeue=True) does the broker deliver the message again.
    final = not (info.state == REJECTED and getattr(info.retval, "requeue", False))
    copies_end = True
    if info.state in (IGNORED, REJECTED):
        copies_end = isinstance(info.retval, Skipped | HandledElsewhere | SelfReplaced)
    return _Ending(final, success=info.state == SUCCESS, copies_end=copies_end)


def trace_eagerly(apply: Callable[..., EagerResult[Any]], args: Any, kwargs: Any) -> EagerResult[Any]:
    """Call Celery's ``apply``, then release what the run still holds."""
    before, ending = running(), _DIED
    try:
        result = apply(*args, **kwargs)
        ending = _Ending(final=True, success=result.state == SUCCESS)
    except Exception:
        ending = _FAILED
        raise
    finally:
        _release_pending_run(before, ending)
    return result


def announce_end(task: SingletonTask, *, retries: bool = False) -> None:
    """Tell the store that the body has ended. Call this before the task publishes its retry or its replacement.

    Args:
        task: The running task.
        retries: The next message is the task's own retry.
    """
    run = current(task.request)
    if run is not None:
        run.announce_end(retries=retries)


def _release_pending_run(before: Execution | None, ending: _Ending) -> None:
    """Release the innermost run if it began after ``before`` and no exit hook has released it."""
    run = running()
    if run is not None and run is not before:
        final, success, died, copies_end = ending
        run.finish(final=final, success=success and not run.skipped, died=died, copies_end=copies_end)


def _rejects_failures(task: Any) -> bool:
    """Return whether Celery rejects the message of a failed task, which may route it to a dead-letter exchange."""
    return bool(task.acks_late and not getattr(task, "acks_on_failure", task.acks_on_failure_or_timeout))
