"""Help for the test suites of projects that use celery-dlock. No server is needed.

With pytest, use the fixture ``dlock``; elsewhere the context manager :class:`DLockKit`.
"""

from __future__ import annotations

from .assertions import assert_excludes, assert_locked, assert_runs_once, assert_separate
from .beats import run_beats
from .kit import DLockKit

__all__ = ["DLockKit", "assert_excludes", "assert_locked", "assert_runs_once", "assert_separate", "run_beats"]
