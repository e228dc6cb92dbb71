"""The option that celery-dlock adds to ``celery worker``."""

from __future__ import annotations

from typing import Any, Final

import click

__all__ = ["METRICS_PORT", "add_options"]

#: The environment variable in place of the option.
METRICS_PORT: Final = "DLOCK_METRICS_PORT"


def add_options(worker: Any) -> None:
    """Add the option to the command ``celery worker``.

    ``app.user_options`` is no place for it. Celery reads that before it imports the modules of the tasks, and only
    these import celery-dlock.
    """
    worker.params.append(
        click.Option(
            ["--dlock-metrics-port"],
            metavar="[HOST:]PORT",
            envvar=METRICS_PORT,
            show_envvar=True,
            help="Where this worker serves the metrics of celery-dlock, in place of the setting dlock_metrics_port.",
        )
    )
