"""The command line ``celery -A app dlock``.

Every ``celery`` command imports this package, so its modules import nothing but click when they are imported.
"""

from __future__ import annotations

from .group import dlock

__all__ = ["dlock"]
