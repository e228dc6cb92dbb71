"""The dashboard: an ASGI app that shows the locks of a Celery app, and acts on them.

Importing this package needs the extra ``celery-dlock[web]``.
"""

from __future__ import annotations

try:
    import jinja2 as _jinja2  # noqa: F401  # only to see whether the extra is installed
    import starlette as _starlette  # noqa: F401
except ImportError as error:
    raise ImportError("the dashboard needs Starlette and Jinja2: pip install 'celery-dlock[web]'") from error

from ..reports.actions import RIGHTS as ACTIONS
from .access import Access, User, read_only
from .dashboard import dashboard

__all__ = ["ACTIONS", "Access", "User", "dashboard", "read_only"]
