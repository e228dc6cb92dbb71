"""The counters of a worker: those of its main process and of its pool children, living and dead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..utils import threads
from .catalog import METRICS, Metric
from .recorder import Recorder
from .table import CounterTable, Layout, Sums

__all__ = ["Counts", "Meter", "Sample"]


class Sample(NamedTuple):
    """The value of one metric for one combination of labels.

    Args:
        labels: The values of the metric's labels, in their order.
        value: The value of a counter, and the sum of a histogram.
        buckets: The observations of each bucket of a histogram, the last one without bound.
    """

    labels: tuple[str, ...]
    value: float
    buckets: tuple[int, ...] = ()


class Meter:
    """The counters of one worker. Create it before the worker forks.

    Args:
        tasks: The names of the tasks that the app has registered.
    """

    def __init__(self, tasks: Iterable[str]) -> None:
        self._layout = Layout(tasks)
        self._recorder = Recorder(self._layout, CounterTable(self._layout))
        self._kept = Sums.zero(self._layout)
        self._children: list[tuple[Callable[[], bool], CounterTable]] = []
        self._lock = threads.lock()

    # In the process that counts

    @property
    def recorder(self) -> Recorder:
        """The recorder of this process. What a process counts that a task's body forked is not exported."""
        if self._recorder.pid != os.getpid():
            self._recorder = Recorder(self._layout, CounterTable(self._layout))
        return self._recorder

    def adopt(self, table: CounterTable) -> None:
        """Use this table in the calling pool child."""
        self._recorder = Recorder(self._layout, table)

    # In the main process

    def open_table(self) -> CounterTable:
        """Return a table for a child that is about to be forked."""
        return CounterTable(self._layout)

    def watch(self, table: CounterTable, ended: Callable[[], bool]) -> None:
        """Add a child's table to the sums from now on.

        Args:
            table: The table of the child.
            ended: Returns whether the child has ended. Its counts are then kept, and its memory is freed.
        """
        self._children.append((ended, table))
        self.sums()

    def sums(self) -> Sums:
        """Return the sums of all processes, and keep those of children that have ended."""
        with self._lock:
            living = []
            sums = Sums.zero(self._layout)
            for ended, table in list(self._children):
                # Ask first: a child that counts between the two lines is read again next time.
                if ended():
                    table.add_to(self._kept)
                    self._children.remove((ended, table))
                else:
                    living.append(table)
            for table in living:
                table.add_to(sums)
            self._recorder.table.add_to(sums)
            sums.add(self._kept.words, self._kept.floats)
        return sums

    def read(self) -> Iterator[tuple[Metric, list[Sample]]]:
        """Return the samples of each metric. Histograms without an observation have none."""
        sums = self.sums()
        for metric in METRICS:
            if metric.source == "worker" and metric.kind != "gauge":
                tasks = self._layout.bases if metric.per_task else [None]
                samples = [
                    self._sample(metric, sums, task, value) for task in tasks for value in metric.values or ("",)
                ]
                yield metric, [sample for sample in samples if metric.kind == "counter" or any(sample.buckets)]

    def _sample(self, metric: Metric, sums: Sums, task: str | None, value: str) -> Sample:
        labels = (*((task,) if task is not None else ()), *((value,) if metric.label else ()))
        start = self._layout.cell(metric.name, task, value)
        if not metric.bounds:
            found = sums.words[start]
            if (metric.name, value) == ("released", "holder"):
                # Each release by the holder is an observation of held_seconds, and is not counted twice.
                found = sum(self._buckets("held_seconds", sums, task))
            return Sample(labels, found)
        buckets = self._buckets(metric.name, sums, task, value)
        if metric.name == "wait_seconds":
            # Only calls that waited are observed. All others took the lock at once.
            acquired = sums.words[self._layout.cell("acquired", task)]
            buckets = [max(0, acquired - sum(buckets)) + buckets[0], *buckets[1:]]
        return Sample(labels, sums.floats[start + self._layout.sum_cell(metric)], tuple(buckets))

    def _buckets(self, name: str, sums: Sums, task: str | None, value: str = "") -> list[int]:
        start = self._layout.cell(name, task, value) + 1
        (bounds,) = (metric.bounds for metric in METRICS if metric.name == name)
        return sums.words[start : start + len(bounds) + 1]


class Counts:
    """The counters of an app, or nothing while metrics are off. Not for what every run does."""

    #: The counters of a worker. Set before it forks.
    meter: Meter | None = None
    #: Whether the program collects the metrics itself (``WorkerCollector``).
    wanted = False

    def start(self, tasks: Iterable[str]) -> None:
        """Count from now on. The arguments are those of :class:`Meter`."""
        self.meter = self.meter or Meter(tasks)

    def count(self, name: str, task: str | None = None, value: str = "") -> None:
        """Add 1 to a counter of :mod:`.catalog`.

        Args:
            name: The name of the metric.
            task: The name of the task, or None.
            value: The value of the metric's other label.
        """
        if self.meter is not None:
            self.meter.recorder.count(name, task, value)

    def observe(self, name: str, seconds: float, task: str | None = None) -> None:
        """Add an observation to a histogram of :mod:`.catalog`."""
        if self.meter is not None:
            self.meter.recorder.observe(name, seconds, task)
