"""The permissions of the dashboard: ``view_lock``, and ``<action>_lock`` for each action.

Django ties permissions to a model, so there is one, without a table.
"""

from __future__ import annotations

from typing import Any

from django.db import models

from ..reports.actions import ACTIONS

__all__ = ["Lock"]


class _NoRows(models.Manager):
    """A manager without rows: ``dumpdata`` reads the default manager of every model, also of one without a table."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class Lock(models.Model):
    """A lock in the lock store."""

    objects = _NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = tuple((f"{action}_lock", f"Can {action.replace('_', ' ')} lock") for action in sorted(ACTIONS))
