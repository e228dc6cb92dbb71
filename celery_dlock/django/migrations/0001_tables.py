"""The permissions of the dashboard, and version 1 of the tables of a lock store in SQL."""

from __future__ import annotations

from django.db import migrations, models

from ..models import Lock
from ..tables import MakeTables


class Migration(migrations.Migration):
    """Version 1."""

    initial = True
    operations = (
        migrations.CreateModel(
            "Lock",
            [("id", models.AutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID"))],
            options=Lock._meta.original_attrs,  # noqa: SLF001  # as Django's own model states do
        ),
        MakeTables(1),
    )
