"""Metrics for Prometheus. The page "Monitor and alert" says what to do with them."""

from __future__ import annotations

from .store import StoreCollector
from .worker import WorkerCollector

__all__ = ["StoreCollector", "WorkerCollector"]
