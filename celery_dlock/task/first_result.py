"""The result of the first run of a used name (``on_used="return"``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery import states

from ..keys.key_spec import LockName
from ..messaging.results import has_backend
from ..utils.log import log_fields, logger

if TYPE_CHECKING:
    from .run import Run

__all__ = ["stored_success"]


def stored_success(run: Run, name: LockName, first: str) -> Mapping[str, Any] | None:
    """Return what the result backend has of the success of the task ``first``; None, mostly after a log line."""
    if not has_backend(run.task):
        _warn_of_missing_result(run, name, first, "no result backend is configured")
        return None
    try:
        stored: Mapping[str, Any] = run.task.backend.get_task_meta(first, cache=False)
    except Exception as error:  # noqa: BLE001  # the backend may raise anything, and then there is no result to return
        _warn_of_missing_result(run, name, first, error)
        return None
    return stored if stored.get("status") == states.SUCCESS else None


def _warn_of_missing_result(run: Run, name: LockName, first: str, why: object) -> None:
    logger.warning(
        "Task %s[%s] cannot return the result of %s (on_used='return') and is skipped: %s",
        run.task.name, run.request.id, first, why, extra=log_fields(run.task.name, run.request.id, name.text),
    )  # fmt: skip
