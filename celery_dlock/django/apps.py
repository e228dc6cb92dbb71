"""The configuration of the Django app."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["CeleryDlockConfig"]


class CeleryDlockConfig(AppConfig):
    """Registers the system checks when Django loads the app."""

    name = "celery_dlock.django"
    label = "celery_dlock"
    verbose_name = "Locks of Celery tasks"
    default_auto_field = "django.db.models.AutoField"  # else Django warns

    def ready(self) -> None:
        """Register the checks."""
        from . import checks  # noqa: F401, PLC0415  # registers at its import, which needs loaded apps
