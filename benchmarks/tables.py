"""Medians, spread and plain-text tables of the measurements."""

from collections.abc import Sequence
from statistics import quantiles


def percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def spread(values: Sequence[float]) -> str:
    """Return the median and the range of the middle half."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain-text table, its first column left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()

    return "\n".join(["  " + line(row) for row in (head, ["-" * width for width in widths], *rows)])
