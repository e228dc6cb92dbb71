"""The members of a group claim their names in one write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from celery.canvas import group

from .unique import BatchClaim

__all__ = ["patch_group_publishing"]


def patch_group_publishing(is_ours: Callable[[Any], bool]) -> None:
    """Have every group ask once for all of its members; those without such tasks are published as ever.

    Celery has no hook between a group's freezing and its publishing, and a subclass would miss the groups that it
    makes itself (a chord's header, a step of a chain). The wrapper has no state; Celery's own generator is inside.

    Args:
        is_ours: Is this one of our tasks?
    """
    applied: Callable[..., Iterator[Any]] = group._apply_tasks  # type: ignore[attr-defined]  # noqa: SLF001  # as above
    if hasattr(applied, "__wrapped__"):
        return

    @functools.wraps(applied)
    def _apply_tasks(self: Any, tasks: Any, producer: Any = None, app: Any = None, *rest: Any, **options: Any) -> Any:
        ours = (app or self.app).tasks
        # What comes from a generator may be without end, so its members ask one by one.
        listed = isinstance(self.tasks, list | tuple)
        if not listed or not any(is_ours(ours.get(name)) for name in _names(self.tasks)):
            yield from applied(self, tasks, producer, app, *rest, **options)
            return
        members = list(tasks)
        together = BatchClaim(
            (ours[member["task"]], _given(member, dict(options)))
            for member, _result, _group_id in members
            if is_ours(ours.get(member["task"]))
        )
        together.enter()
        try:
            yield from applied(self, iter(members), producer, app, *rest, **options)
        finally:
            together.leave()
            together.give_back()

    group._apply_tasks = _apply_tasks  # type: ignore[attr-defined]  # noqa: SLF001  # as above


def _names(tasks: Iterable[Any]) -> Iterator[str]:
    for task in tasks:
        if task.get("subtask_type") == "group":
            yield from _names(task["kwargs"]["tasks"])
        else:
            yield task["task"]


def _given(member: Any, options: dict[str, Any]) -> dict[str, Any]:
    """What its ``apply_async`` will be given."""
    for not_its in ("p", "chord", "group_index", "add_to_parent"):
        options.pop(not_its, None)
    args, kwargs, options = member._merge(options.pop("args", None), options.pop("kwargs", None), options)  # noqa: SLF001  # as it is merged for the message
    return {**options, "args": args, "kwargs": kwargs}
