"""The command line ``celery -A app dlock``.

Every ``celery`` command imports this package, so its modules import nothing but click when they are imported.
Celery has imported its own commands by then.
"""

from __future__ import annotations

from celery.bin.worker import worker

from .group import dlock
from .worker_options import add_options

__all__ = ["dlock"]

add_options(worker)
