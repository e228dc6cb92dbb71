"""The current Celery app of the Django project, and its tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from celery.app import app_or_default

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["celery_app", "import_tasks"]

#: Celery's own switch: if it is set, importing the task modules does not run Django's checks again.
_SKIP = "CELERY_SKIP_CHECKS"


def celery_app() -> Celery:
    """Return the current Celery app."""
    found: Celery = app_or_default()
    return found


def import_tasks(app: Celery) -> None:
    """Import the task modules of the app, as a worker does. Python imports each of them only once."""
    with _without_checks():
        app.loader.import_default_modules()


@contextmanager
def _without_checks() -> Iterator[None]:
    before = os.environ.get(_SKIP)
    os.environ[_SKIP] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SKIP, None)
        else:
            os.environ[_SKIP] = before
