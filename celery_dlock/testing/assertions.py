"""Assertions about lock names and locks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..locking.events import Event
from ..locking.owner import current_context
from ..task.base import SingletonTask

if TYPE_CHECKING:
    from celery.canvas import Signature

__all__ = ["assert_excludes", "assert_locked", "assert_runs_once", "assert_separate"]


def assert_excludes(one: Signature[Any], other: Signature[Any]) -> None:
    """Fail unless the two calls have one lock, so that they never run at the same time.

    With ``limit`` above 1, calls of one name may run at the same time. To test the key of such a task, compare
    ``task.lock_name()`` of both calls.

    Args:
        one: A call as a signature: ``task.s(7)``.
        other: The other call. It may be of another task.
    """
    names = _name_of(one), _name_of(other)
    assert names[0] == names[1], (
        f"{one} and {other} may run at the same time: their locks are {names[0]} and {names[1]}"
    )
    limit = max(call.type.lock_options.limit for call in (one, other))
    assert limit == 1, f"{one} and {other} may run at the same time: {limit} calls may hold {names[0]} at once (limit)"


def assert_separate(one: Signature[Any], other: Signature[Any]) -> None:
    """Fail unless the two calls have different locks, so that they may run at the same time.

    Args:
        one: A call as a signature: ``task.s(7)``.
        other: The other call. It may be of another task.
    """
    name = _name_of(one)
    assert name != _name_of(other), f"{one} and {other} exclude each other: both have the lock {name}"


def _name_of(call: Signature[Any]) -> str:
    task: Any = call.type
    if not isinstance(task, SingletonTask):
        raise TypeError(f"{call} has no lock: expected the signature of a singleton task")
    return task.lock_name(*call.args, **call.kwargs)


def assert_runs_once(task: SingletonTask, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Run a call twice, and fail unless its body runs the first time only (``once_per``).

    Args:
        task: The task. Its body really runs, in this process.
        args: The call's positional arguments.
        kwargs: The call's keyword arguments.
    """
    first = task.apply(tuple(args), dict(kwargs or {}))
    assert first.successful(), f"the first call of {task.name} did not succeed: {first.state}: {first.result!r}"
    events: list[Event] = []
    listeners = task.dlock.listeners
    listeners.add(events.append)
    try:
        task.apply(tuple(args), dict(kwargs or {}))
    finally:
        listeners.remove(events.append)
    assert all(event.kind != "acquired" for event in events), f"{task.name} ran twice: expected once_per to prevent it"


def assert_locked() -> None:
    """Fail unless this code runs under a lock that is held: in the body of a singleton task, or in a ``Lock``.

    Call it in code that must not run at the same time as itself.
    """
    held = any(lease.held for lease in current_context("").entered)
    assert held, "this code runs without a lock: expected the body of a singleton task, or a with block of a Lock"
