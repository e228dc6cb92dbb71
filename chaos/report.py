"""A run as a table for people."""

from collections import Counter
from collections.abc import Iterator, Sequence

from chaos.checker import Findings
from chaos.run import Record

WIDTH = 46


def report(record: Record, found: Findings) -> str:
    return "\n".join(_lines(record, found)) + "\n"


def _lines(record: Record, found: Findings) -> Iterator[str]:
    yield _row("seconds", f"{record.seconds:.0f}")
    yield _row("faults", str(record.faults.total()))
    yield from _rows(record.faults)
    yield _row("faults without a target", str(record.missed))
    yield _row("workers that ended and were started again", str(record.workers_ended))
    yield _row("workers that did not end after SIGTERM", str(record.stuck))
    yield from _findings(record, found)
    yield ""
    yield f"{'seconds until a key was free after':{WIDTH}} {'n':>4} {'p50':>6} {'p99':>6} {'max':>6}"
    for kind, seconds in sorted(record.freed.items()):
        p50, p99 = quantile(seconds, 0.5), quantile(seconds, 0.99)
        yield f"  {kind:{WIDTH - 2}} {len(seconds):4} {p50:6.2f} {p99:6.2f} {max(seconds):6.2f}"
    yield _row("  deaths that met another fault", str(record.not_measured))
    yield ""
    yield f"promises broken: {len(found.broken)}"
    yield from (f"  {line}" for line in found.broken)


def _findings(record: Record, found: Findings) -> Iterator[str]:
    yield _row("executions", str(found.executions))
    yield from _rows(found.hows)
    yield _row("ends of messages", str(len(record.ends)))
    yield from _rows(Counter(record.ends.values()))
    yield _row("overlaps without fencing", str(found.overlaps.total()))
    yield from _rows(found.overlaps)
    yield _row("late writes refused by the resource", str(found.refused))
    yield _row("overlaps with fencing", str(found.fenced_overlaps))
    yield _row("lost messages", str(found.lost.total()))
    yield from _rows(found.lost)
    yield _row("messages done twice", str(found.doubled.total()))
    yield from _rows(found.doubled)
    yield _row("calls replaced by a newer one (debounce)", str(found.replaced))
    yield _row("  of these done before", str(found.replaced_after.total()))
    yield from _rows(found.replaced_after)
    yield _row("messages still waiting at the end", str(found.still.total()))
    yield from _rows(found.still)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that is not less than `part` of them."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _rows(counts: Counter[str]) -> Iterator[str]:
    for what, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield _row(f"  {what}", str(count))


def _row(what: str, value: str) -> str:
    return f"{what:{WIDTH}} {value:>4}"
