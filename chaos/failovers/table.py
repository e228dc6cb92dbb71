"""Runs as a table for people, and as figures for programs."""

from collections.abc import Sequence
from typing import Any

from chaos.failovers.checker import Findings
from chaos.failovers.run import Record
from chaos.report import quantile

HEAD = (
    "store", "declared", "failovers", "bodies", "double grants", "not notified", "notified late", "notified before",
    "refused", "let through", "lost", "lost in store", "again after p50", "max", "broken",
)  # fmt: skip


def figures(way: str, record: Record, found: Findings) -> dict[str, Any]:
    """One run; times in seconds."""
    resumed = [failover.resumed for failover in record.failovers]
    return {
        "store": record.plan.store,
        "declared": way,
        "failovers": len(record.failovers),
        "bodies": found.executions,
        "double_grants": found.double_grants,
        "not_told": found.not_told,
        "told_inside": found.told_inside,
        "told_before": found.told_before,
        "writes_refused": found.refused,
        "writes_let_through": found.let_through,
        "tasks": len(record.ends),
        "lost": found.lost,
        "lost_in_store": found.lost_in_store,
        "twice": found.twice,
        "still_waiting": len(record.waiting),
        "grants_again_p50": round(quantile(resumed, 0.5), 2),
        "grants_again_max": round(max(resumed), 2),
        "each": [{"how": f.how, "cut_off": f.cut, "grants_again": round(f.resumed, 2)} for f in record.failovers],
        "seconds": round(record.seconds),
        "broken": found.broken,
    }


def table(done: Sequence[tuple[str, Record, Findings]]) -> str:
    rows = [HEAD, *(_row(figures(*one)) for one in done)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    keys = (
        "store", "declared", "failovers", "bodies", "double_grants", "not_told", "told_inside", "told_before",
        "writes_refused", "writes_let_through", "lost", "lost_in_store",
    )  # fmt: skip
    times = f"{one['grants_again_p50']:.2f}", f"{one['grants_again_max']:.2f}"
    return (*(str(one[key]) for key in keys), *times, str(len(one["broken"])))
