"""The pages of the admin as models, so that Django's admin lists them and its users can get permissions for them.

No model has a table. The rows of each page come from :class:`~celery_dlock.control.LockControl`.
"""

from __future__ import annotations

from typing import Any

from django.db import models

__all__ = ["DeadLetter", "HeldLock", "UnknownOutcome", "WaitingCall"]


class _NoRows(models.Manager):
    """A manager without rows: ``dumpdata`` reads the default manager of every model, also of one without a table."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class _Page(models.Model):
    """A page of the admin. Its key is a lock name."""

    name = models.CharField("lock name", max_length=1024, primary_key=True)

    objects = _NoRows()

    class Meta:
        abstract = True
        managed = False
        default_permissions = ("view",)
        base_manager_name = "objects"

    def __str__(self) -> str:
        return str(self.name)


class HeldLock(_Page):
    """The locks that are held, granted or kept."""

    class Meta(_Page.Meta):
        verbose_name = "held lock"
        permissions = (
            ("release_heldlock", "Can release held lock"),
            ("hold_heldlock", "Can hold and unhold a lock"),
            ("forget_heldlock", "Can forget a used name, in the dashboard"),
            ("drop_claim_heldlock", "Can drop a claim, in the dashboard"),
        )


class WaitingCall(_Page):
    """The calls that wait for their lock (``on_conflict="queue"``)."""

    class Meta(_Page.Meta):
        verbose_name = "waiting call"
        permissions = (("drop_waitingcall", "Can drop waiting call"),)


class UnknownOutcome(_Page):
    """The runs whose process died in the body (``once_per``)."""

    class Meta(_Page.Meta):
        verbose_name = "unknown outcome"
        permissions = (("resolve_unknownoutcome", "Can resolve unknown outcome"),)


class DeadLetter(_Page):
    """The parked messages that were set aside."""

    class Meta(_Page.Meta):
        verbose_name = "dead letter"
        permissions = (
            ("requeue_deadletter", "Can requeue dead letter"),
            ("drop_deadletter", "Can drop dead letter"),
        )
