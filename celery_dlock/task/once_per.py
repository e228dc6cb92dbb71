"""Run marks (``once_per``) as an operator reads, deletes and resolves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidLockOptions
from ..keys.lock_name import LockName
from ..options.error_texts import invalid_value
from .call_options import ARGUMENT, Call, call_of, headers_for

if TYPE_CHECKING:
    from ..store.operator_model import RunView
    from .base import SingletonTask

__all__ = ["forget", "last_run", "resolve"]


def last_run(task: SingletonTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunView | None:
    """Return the last run of a call's name: used, running or of unknown outcome. Return None if it is none of these."""
    if not task.dlock.enabled:
        return None
    return task.dlock.lock_store.last_run(_name(task, args, kwargs))


def forget(task: SingletonTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Delete the run mark of a call's name. Return false if there was none."""
    if not task.dlock.enabled:
        return False
    return task.dlock.lock_store.forget_run(_name(task, args, kwargs))


def resolve(task: SingletonTask, args: Sequence[Any], kwargs: Mapping[str, Any], *, sent: object) -> bool:
    """Record the outcome of a run whose process died. Return false if the name has no unknown outcome."""
    call = _call(task, kwargs)
    window = call.options.once_seconds
    if window is None:
        raise InvalidLockOptions(
            f"task {task.name!r}: resolve() needs once_per: set it on the task, or pass dlock={{'once_per': ...}}"
        )
    if not isinstance(sent, bool):
        raise InvalidLockOptions(f"task {task.name!r}: {invalid_value('resolve(): sent', sent, 'True or False')}")
    if not task.dlock.enabled:
        return False
    name = _name(task, args, kwargs)
    return task.dlock.lock_store.resolve_run(name, sent=sent, window_ms=round(window * 1000))


def _name(task: SingletonTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LockName:
    return _call(task, kwargs).name_of(args, {key: value for key, value in kwargs.items() if key != ARGUMENT})


def _call(task: SingletonTask, kwargs: Mapping[str, Any]) -> Call:
    return call_of(task, headers_for(task, kwargs.get(ARGUMENT), None))
