"""The charts of the last hour, as rectangles that a template draws: one bar for each minute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Final, NamedTuple

from ..counters.catalog import metric
from .samples import HOUR, Change, Sample

__all__ = ["HEIGHT", "WIDTH", "Bar", "Chart", "Life", "Stretch", "charts", "life"]

#: Seconds of one bar, and of one number in the text of a chart.
MINUTE, TEXT_STEP = 60, 600
BARS: Final = int(HOUR) // MINUTE
#: The size of a picture in units of its own, which the style sheet stretches. A bar is STEP wide.
STEP, HEIGHT = 10, 100
WIDTH: Final = STEP * BARS
#: Colours of holders in the style sheet. If a lock had more holders, some share one.
COLOURS: Final = 8
#: The kinds of bars from the lowest to the highest; one that a newer worker tells stands below them.
_ORDER: Final = {value: index for index, value in enumerate((*metric("conflicts").values, *metric("lost").values))}

#: The numbers of each minute by kind; None if no sample tells of it.
Minutes = list[Counter[str] | None]
Join = Callable[[Iterable[int]], int]


class Bar(NamedTuple):
    """A rectangle of a picture.

    Args:
        x: Its left end.
        y: Its upper end.
        width: Its width.
        height: Its height.
        kind: What it shows, which decides about its colour: the value of a metric's label, or a holder.
        text: What it shows, in words.
    """

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str


class Chart(NamedTuple):
    """A number of each minute.

    Args:
        title: What it is.
        total: The number of the whole hour; None if it is not known for any minute.
        top: The number at the upper end, which the scale ends with.
        bars: The bars.
        gaps: The minutes of which nothing is known.
        legend: The number of each kind in the hour, if there are kinds.
        times: The times at the left end, in the middle and at the right end.
        text: The numbers in words, for screen readers.
    """

    title: str
    total: int | None
    top: int
    bars: Sequence[Bar]
    gaps: Sequence[Bar]
    legend: Mapping[str, int]
    times: Sequence[str]
    text: str


class Stretch(NamedTuple):
    """A time in which one holder had a lock.

    Args:
        change: The state and the holder.
        begin: Its start, in seconds since the epoch.
        end: Its end, as samples saw it; None if it has not ended.
        bar: Its rectangle.
    """

    change: Change
    begin: float
    end: float | None
    bar: Bar


class Life(NamedTuple):
    """The last hour of a lock.

    Args:
        stretches: Its holders, the oldest first.
        legend: The holders by the kinds of their bars.
        waiters: The chart of its waiters. Its gaps and times are those of the holders too.
    """

    stretches: Sequence[Stretch]
    legend: Mapping[str, str]
    waiters: Chart


def charts(samples: Sequence[Sample], now: float, task: str | None = None) -> list[Chart]:
    """Return the charts of the last hour.

    Args:
        samples: The samples.
        now: The present time, in seconds since the epoch.
        task: The task; None for all.
    """

    def counted(metric: str) -> Callable[[Sample], Mapping[str, int] | None]:
        def read(sample: Sample) -> Mapping[str, int] | None:
            found = Counter[str]()
            for key, number in sample.counted.items():
                if key[0] == metric and task in (None, key[1]):
                    found[key[2]] += number
            return found if sample.counting else None

        return read

    def waiting(sample: Sample) -> Mapping[str, int]:
        return {"": sum(sample.waiting.values()) if task is None else sample.waiting.get(task, 0)}

    return [
        _chart(title, _minutes(samples, now, read, join), now, join)
        for title, read, join in (
            ("Locks taken", counted("acquired"), sum),
            ("Conflicts", counted("conflicts"), sum),
            ("Waiting calls, most at once", waiting, max),
            ("Lost leases", counted("lost"), sum),
        )
    ]


def life(changes: Sequence[Change], samples: Sequence[Sample], now: float) -> Life:
    """Return the last hour of a lock.

    Args:
        changes: Its changes, the oldest first. The last one is its present state.
        samples: The samples.
        now: The present time, in seconds since the epoch.
    """
    start = _start(now)
    minutes = _minutes(samples, now, lambda _: {}, max)
    minutes[-1] = minutes[-1] or Counter()  # the present state is known, also without a sample
    for change, end in _with_ends(changes):
        last = now if end is None else end
        for minute in minutes[max(0, _bar(change.at, start)) : max(0, _bar(last, start) + 1)]:
            if minute is not None:
                minute[""] = max(minute[""], change.waiting)
    holders = [change for before, change in zip([None, *changes], changes, strict=False) if not change.goes_on(before)]
    stretches = []
    kinds: dict[str, str] = {}
    for change, end in _with_ends(holders):
        begin, last = max(change.at, start), now if end is None else end
        if change.state and last > begin:
            left, right = ((time - start) / MINUTE * STEP for time in (begin, last))
            text = f"{clock(begin)} to {'now' if end is None else clock(end)}: {change.holder}"
            kind = kinds.setdefault(change.holder, f"holder{len(kinds) % COLOURS}")
            bar = Bar(left, 0, max(2, right - left - 1), HEIGHT, kind, text)
            stretches.append(Stretch(change, change.at, end, bar))
    legend = {kind: ", ".join(one for one in kinds if kinds[one] == kind) for kind in kinds.values()}
    return Life(stretches, legend, _chart("Waiters, most at once", minutes, now, max))


def _with_ends(changes: Sequence[Change]) -> Iterator[tuple[Change, float | None]]:
    """Yield each change with the time of the next one; None after the last."""
    return zip(changes, [*(change.at for change in changes[1:]), None], strict=False)


def clock(time: float) -> str:
    """Return a time of the day in UTC."""
    return datetime.fromtimestamp(time, timezone.utc).strftime("%H:%M")


def _start(now: float) -> int:
    """Return the time at the left end, a whole minute. The present minute is the last bar."""
    return (int(now) // MINUTE + 1) * MINUTE - int(HOUR)


def _bar(time: float, start: int) -> int:
    """Return the number of the bar of a time."""
    return math.floor((time - start) / MINUTE)


def _minutes(
    samples: Sequence[Sample], now: float, read: Callable[[Sample], Mapping[str, int] | None], join: Join
) -> Minutes:
    """Return the numbers of each minute.

    Args:
        samples: The samples.
        now: The present time.
        read: Returns the numbers of a sample by kind; None if it does not tell them.
        join: Makes one number of those of several samples: ``sum`` of what was counted, or ``max``.
    """
    start = _start(now)
    minutes: Minutes = [None] * BARS
    for sample in samples:
        found, last = read(sample), _bar(sample.at, start)
        # The sample also covers the whole minutes since the one before.
        for index in range(max(0, min(_bar(sample.since, start) + 1, last)), last + 1) if found is not None else ():
            minute = minutes[index] = minutes[index] or Counter()
            for kind, number in found.items() if found and (index == last or join is max) else ():
                minute[kind] = join((minute[kind], number))
    if minutes[-1] is None and minutes[-2] is not None:
        minutes[-1] = Counter()  # the sample of the present minute is still to come
    return minutes


def _chart(title: str, minutes: Minutes, now: float, join: Join) -> Chart:
    start = _start(now)
    known = [minute for minute in minutes if minute is not None]
    kinds = sorted({kind for minute in known for kind in minute if minute[kind]}, key=lambda kind: _ORDER.get(kind, -1))
    top = max((sum(minute.values()) for minute in known), default=0)
    bars, gaps = [], []
    for index, minute in enumerate(minutes):
        x, at = index * STEP, clock(start + index * MINUTE)
        if minute is None:
            gaps.append(Bar(x, 0, STEP, HEIGHT, "gap", f"{at}: unknown"))
            continue
        y = float(HEIGHT)
        for kind in kinds:
            height = HEIGHT * minute[kind] / max(1, top)
            y -= height
            if height:
                bars.append(Bar(x, y, STEP - 1, height, kind, f"{at}: {minute[kind]} {kind}".strip()))
    return Chart(
        title,
        join(sum(minute.values()) for minute in known) if known else None,
        top,
        bars,
        gaps,
        {kind: join(minute[kind] for minute in known) for kind in kinds if kind},
        [clock(start), clock(start + HOUR / 2), clock(start + HOUR)],
        _text(minutes, start, join),
    )


def _text(minutes: Minutes, start: int, join: Join) -> str:
    """Return the numbers in words, in steps of 10 minutes."""
    parts = []
    for index in range(0, BARS, TEXT_STEP // MINUTE):
        known = [minute for minute in minutes[index : index + TEXT_STEP // MINUTE] if minute is not None]
        number = join(sum(minute.values()) for minute in known) if known else "unknown"
        parts.append(f"{clock(start + index * MINUTE)}: {number}")
    return f"{'Sum' if join is sum else 'Maximum'} of 10 minutes from " + ", ".join(parts)
