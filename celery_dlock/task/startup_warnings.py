"""Warnings at a worker's start about tasks that have lock options but run without a lock.

A signal triggers them. The worker step of this library would not: it runs only if the app has a singleton task.
"""

from __future__ import annotations

from typing import Any

from celery.signals import celeryd_after_setup

from ..utils.log import log_fields, logger
from .app_check import unlocked_tasks

__all__ = ["warn_about_unlocked_tasks"]


def warn_about_unlocked_tasks(instance: Any, **_facts: Any) -> None:
    """Log one warning for each task of a worker's app that has lock options but runs without a lock."""
    for name, text in unlocked_tasks(instance.app):
        logger.warning("%s", text, extra=log_fields(name))


celeryd_after_setup.connect(warn_about_unlocked_tasks)
