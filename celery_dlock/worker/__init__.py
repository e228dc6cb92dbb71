"""The parts of the library that run in the main process of a Celery worker."""

from __future__ import annotations

from .bootstep import SingletonStep
from .request import SingletonRequest

__all__ = ["SingletonRequest", "SingletonStep"]
