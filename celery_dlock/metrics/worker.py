"""The counters of a worker as a collector of ``prometheus_client``, which is imported only where it is used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..counters.catalog import Metric, metric
from ..counters.meter import Sample
from ..errors import InvalidLockOptions
from ..runtime import NO_WORKER, Runtime

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["WorkerCollector", "import_prometheus"]


def import_prometheus() -> Any:
    """Return the module ``prometheus_client``.

    Raises:
        InvalidLockOptions: It is not installed.
    """
    try:
        import prometheus_client  # noqa: PLC0415  # an optional dependency
        import prometheus_client.core  # noqa: PLC0415
    except ImportError as error:
        raise InvalidLockOptions(
            "metrics need the package prometheus_client: pip install 'celery-dlock[prometheus]'"
        ) from error
    return prometheus_client


class WorkerCollector:
    """The counters of this worker, for a registry of ``prometheus_client``.

    Register it in the worker's main process before the pool starts. The module of the app is a place for that, or a
    receiver of Celery's signal ``worker_init``. Outside a worker it collects nothing. With the setting
    ``dlock_metrics_port``, celery-dlock serves the same metrics and needs no collector.

    Args:
        app: The Celery app of the worker.

    Raises:
        InvalidLockOptions: ``prometheus_client`` is not installed, or the worker's pool has started already.
    """

    def __init__(self, app: Celery) -> None:
        self._prometheus = import_prometheus()
        self._runtime = runtime = Runtime.of(app)
        if runtime.counts.meter is None and runtime.worker is not NO_WORKER:
            raise InvalidLockOptions(
                "this worker counts nothing, because its pool has started: create the WorkerCollector in the module of "
                "the app, or in a receiver of the signal worker_init"
            )
        runtime.counts.wanted = True

    def describe(self) -> list[Any]:
        """Return no description, so that registering the collector collects nothing."""
        return []

    def collect(self) -> Iterator[Any]:
        """Return the metric families of ``prometheus_client``, with the sums of all processes of the worker."""
        meter = self._runtime.counts.meter
        if meter is None:
            return
        core = self._prometheus.core
        for found, samples in meter.read():
            yield _histogram(core, found, samples) if found.bounds else _counter(core, found, samples)
        yield build_info(core)


def build_info(core: Any) -> Any:
    """Return the gauge that names the version of celery-dlock."""
    info = metric("build_info")
    family = core.GaugeMetricFamily(info.exported, info.meaning, labels=info.labels)
    family.add_metric((version("celery-dlock"),), 1)
    return family


def _counter(core: Any, found: Metric, samples: list[Sample]) -> Any:
    family = core.CounterMetricFamily(found.exported, found.meaning, labels=found.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def _histogram(core: Any, found: Metric, samples: list[Sample]) -> Any:
    family = core.HistogramMetricFamily(found.exported, found.meaning, labels=found.labels)
    bounds = [*(str(bound) for bound in found.bounds), "+Inf"]
    for sample in samples:
        up_to = itertools.accumulate(sample.buckets)
        family.add_metric(sample.labels, list(zip(bounds, up_to, strict=True)), sample.value)
    return family
