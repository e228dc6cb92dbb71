"""The members of a group claim their names in one round trip (``unique=``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from celery.canvas import group

from .unique import BatchClaim

__all__ = ["patch_group_publishing"]


def patch_group_publishing(is_ours: Callable[[Any], bool]) -> None:
    """Replace ``group._apply_tasks``, so that a group claims all of its members' names in one round trip.

    Celery has no hook between freezing a group and publishing it. A subclass would miss the groups that Celery makes
    itself: the header of a chord, a step of a chain. The wrapper has no state and calls Celery's own generator. Groups
    without singleton tasks are published as before.

    Args:
        is_ours: Returns whether a task is a singleton task.
    """
    applied: Callable[..., Iterator[Any]] = group._apply_tasks  # type: ignore[attr-defined]  # noqa: SLF001
    if hasattr(applied, "__wrapped__"):
        return

    @functools.wraps(applied)
    def _apply_tasks(self: Any, tasks: Any, producer: Any = None, app: Any = None, *rest: Any, **options: Any) -> Any:
        ours = (app or self.app).tasks
        # Celery makes a list of a generator. Any other container may be infinite: claim its members one by one.
        listed = isinstance(self.tasks, list | tuple)
        if not listed or not any(is_ours(ours.get(name)) for name in _names(self.tasks)):
            yield from applied(self, tasks, producer, app, *rest, **options)
            return
        members = list(tasks)
        claims = BatchClaim(
            (ours[member["task"]], _given(member, dict(options)))
            for member, _result, _group_id in members
            if is_ours(ours.get(member["task"]))
        )
        claims.enter()
        try:
            yield from applied(self, iter(members), producer, app, *rest, **options)
        finally:
            claims.leave()
            claims.release_unpublished()

    group._apply_tasks = _apply_tasks  # type: ignore[attr-defined]  # noqa: SLF001


def _names(tasks: Iterable[Any]) -> Iterator[str]:
    for task in tasks:
        if task.get("subtask_type") == "group":
            yield from _names(task["kwargs"]["tasks"])
        else:
            yield task["task"]


def _given(member: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the member's ``apply_async`` will get."""
    for group_option in ("p", "chord", "group_index", "add_to_parent"):
        options.pop(group_option, None)
    args, kwargs, options = member._merge(options.pop("args", None), options.pop("kwargs", None), options)  # noqa: SLF001  # as Celery merges the message's options
    return {**options, "args": args, "kwargs": kwargs}
