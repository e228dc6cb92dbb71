"""The contents of the lock store as a collector of ``prometheus_client``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from ..control import LockControl
from ..counters.catalog import METRICS, OTHER
from ..errors import StoreUnavailable
from .worker import build_info, import_prometheus

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["StoreCollector"]

#: Seconds for which the gauges are kept: each reading scans the store.
CACHED: Final = 10.0

_GAUGES: Final = {metric.name: metric for metric in METRICS if metric.kind == "gauge"}
#: The gauges that count by task, each with its field of :class:`~celery_dlock.control.Counts`.
_COUNTED: Final = {name: name.removesuffix("_seconds") for name, gauge in _GAUGES.items() if gauge.per_task}


class StoreCollector:
    """The locks, waiters, dead letters, unknown outcomes and claims in the store, for a ``prometheus_client`` registry.

    One process is enough for all workers. A reading scans the keys of the store step by step, and is kept for 10 s.
    If the store does not answer, only ``store_up`` is shown.

    Args:
        app: The Celery app whose store to read.

    Raises:
        InvalidLockOptions: ``prometheus_client`` is not installed, or a setting is invalid.
        NoLockStore: No setting names a store.
    """

    def __init__(self, app: Celery) -> None:
        self._core = import_prometheus().core
        self._control = LockControl(app)
        self._one_reader = Lock()
        self._families: list[Any] = []
        self._read_at = -CACHED

    def describe(self) -> list[Any]:
        """Return no description, so that registering the collector reads nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """Return the metric families of ``prometheus_client``, at most 10 s old."""
        with self._one_reader:
            if time.monotonic() - self._read_at >= CACHED:
                self._families, self._read_at = self._read(), time.monotonic()
            yield from self._families

    def _read(self) -> list[Any]:
        began = time.monotonic()
        health = self._control.health()
        up, found = health.up, list[Any]()
        if up:
            try:
                counts = self._control.counts()
            except StoreUnavailable:
                up = False
            else:
                found = [self._gauge(name, getattr(counts, of)) for name, of in _COUNTED.items()]
                found.append(self._gauge("store_clock_offset_seconds", health.clock_offsets))
                found.append(self._gauge("scrape_seconds", {"": time.monotonic() - began}))
        servers = self._gauge("store_up", dict.fromkeys(health.stores, float(up)))
        return [servers, build_info(self._core), *found]

    def _gauge(self, name: str, values: Mapping[str, float]) -> Any:
        found = _GAUGES[name]
        family = self._core.GaugeMetricFamily(found.exported, found.meaning, labels=found.labels)
        for label, value in values.items():
            family.add_metric((label or OTHER,) if found.labels else (), value)
        return family
