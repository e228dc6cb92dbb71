"""The parts of the library that run in the main process of a Celery worker."""

from __future__ import annotations

from .bootstep import KeeperStep
from .request import SingletonRequest

__all__ = ["KeeperStep", "SingletonRequest"]
