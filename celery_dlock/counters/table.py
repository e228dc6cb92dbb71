"""Counters in memory that a parent process can read: one row for each thread that counts.

A row has one writer, so no increment needs a lock, and a process that dies leaves no lock behind. A cell is one aligned
word of 64 bits, stored at once: a whole number, or a floating-point number for the sum of a histogram.
"""

from __future__ import annotations

import collections
import itertools
import math
import mmap
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from ..utils import threads
from .catalog import METRICS, OTHER, Metric

__all__ = ["MAX_TASKS", "CounterTable", "Layout", "RowLease", "Sums", "bucket_of"]

#: The number of task names with a label of their own. All others share the label ``other``.
MAX_TASKS: Final = 200
#: The rows of a table. If more threads count at the same time, they share the last row.
ROWS: Final = 64
#: The first word of a table: the number of rows that were ever used. It has a page of its own.
_HEADER: Final = mmap.PAGESIZE // 8
_BUCKETS: Final = {
    metric.name: partial(bisect_left, (-math.inf, *metric.bounds)) for metric in METRICS if metric.bounds
}


def bucket_of(name: str) -> Callable[[float], int]:
    """Return the function from an observation of this histogram to the number of its bucket; the first one is 1."""
    return _BUCKETS[name]


class Layout:
    """The index of each cell in a row.

    Args:
        tasks: The names of the tasks that the app has registered.
    """

    def __init__(self, tasks: Iterable[str]) -> None:
        names = (*sorted(set(tasks))[:MAX_TASKS], OTHER)
        self._task_cells, width = _cells(metric for metric in METRICS if metric.per_task)
        self._other_cells, rest = _cells(metric for metric in METRICS if not metric.per_task)
        #: The number of a task's first cell, by the name of the task.
        self.bases = {name: number * width for number, name in enumerate(names)}
        self._end_of_tasks = width * len(names)
        self.words = self._end_of_tasks + rest

    def cell(self, name: str, task: str | None, value: str = "") -> int:
        """Return the first cell of a metric, of a histogram the one before its buckets.

        Args:
            name: The name of the metric.
            task: The name of the task, or None.
            value: The value of the metric's other label.
        """
        if (name, value) in self._other_cells:
            return self._end_of_tasks + self._other_cells[name, value]
        return self.bases.get(task or OTHER, self.bases[OTHER]) + self._task_cells[name, value]

    def sum_cell(self, metric: Metric) -> int:
        """Return the distance from a histogram's first cell to the cell of its sum."""
        return len(metric.bounds) + 2


def _cells(metrics: Iterable[Metric]) -> tuple[dict[tuple[str, str], int], int]:
    """Return the first cell of each metric and label value, and the number of all cells."""
    cells: dict[tuple[str, str], int] = {}
    used = 0
    for metric in metrics:
        if metric.kind == "gauge":
            continue
        for value in metric.values or ("",):
            # The first bucket is the cell behind a histogram's first cell, so a counter can use that one.
            start = cells[metric.name, value] = used - 1 if metric.bounds and used else used
            used = start + (len(metric.bounds) + 3 if metric.bounds else 1)
    return cells, used


class Sums:
    """The contents of tables, added up.

    Args:
        words: The cells as whole numbers.
        floats: The same cells as floating-point numbers.
    """

    def __init__(self, words: list[int], floats: list[float]) -> None:
        self.words = words
        self.floats = floats

    @classmethod
    def zero(cls, layout: Layout) -> Sums:
        return cls([0] * layout.words, [0.0] * layout.words)

    def add(self, words: Iterable[int], floats: Iterable[float]) -> None:
        self.words = list(map(operator.add, self.words, words))
        self.floats = list(map(operator.add, self.floats, floats))


class CounterTable:
    """The counters of one process, created before a fork if a child is to use them.

    Args:
        layout: The cells of each row.
        rows: The number of rows. Pages that were never written use no memory.
    """

    def __init__(self, layout: Layout, rows: int = ROWS) -> None:
        self._layout = layout
        self._rows = rows
        memory = memoryview(mmap.mmap(-1, (_HEADER + rows * layout.words) * 8))
        # The native format stores a whole word at once.
        self._header = memory.cast("Q")
        self.words = memory.cast("Q")[_HEADER:]
        self.floats = memory.cast("d")[_HEADER:]
        self._free: collections.deque[int] = collections.deque()
        self._next_row = itertools.count()

    def open_row(self) -> RowLease:
        """Return a row for the calling thread. Its counts stay when the thread ends, and another thread goes on."""
        try:
            row = self._free.popleft()
        except IndexError:
            row = min(next(self._next_row), self._rows - 1)
            self._header[0] = max(self._header[0], row + 1)
        return RowLease(self._free, row, row * self._layout.words)

    def add_to(self, sums: Sums) -> None:
        """Add all rows to ``sums``."""
        width = self._layout.words
        for row in range(self._header[0]):
            part = slice(row * width, (row + 1) * width)
            sums.add(self.words[part], self.floats[part])


class RowLease:
    """The use of a row by one thread. It ends with the thread.

    Args:
        free: Gets the number of the row when the thread has ended.
        row: The number of the row.
        start: The first cell of the row.
    """

    def __init__(self, free: collections.deque[int], row: int, start: int) -> None:
        self._free = free
        self._row = row
        self.start = start

    def __del__(self) -> None:
        self._free.append(self._row)


def thread_rows(table: CounterTable, layout: Layout) -> Any:
    """Return an object whose attribute ``start`` is the first cell of the calling thread's row.

    Its attribute ``bases`` maps the name of each task to the first cell of that task in this row. Threads are native
    ones, because greenlets of one thread do not interrupt each other while they count.
    """

    class Rows(threads.local_class()):  # type: ignore[misc]  # gevent's original class has no type
        def __init__(self) -> None:
            self._row = table.open_row()
            self.start = self._row.start
            self.bases = _Bases({task: self.start + base for task, base in layout.bases.items()})

    return Rows()


class _Bases(dict[Any, int]):
    def __missing__(self, task: Any) -> int:
        return self[OTHER]
