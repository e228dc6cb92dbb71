"""The demo's output: a live table in a terminal, or plain lines in a pipe."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from example_project.demo.history import Fact
from example_project.demo.ledgers import LedgerRow, total
from example_project.demo.verdict import Row

_LINES_EVERY = 3.0  # seconds between two plain lines of progress

#: Without the web fonts, which a browser does not load for a picture in a page.
_PICTURE = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


class Screen:
    def __init__(self, console: Console | None = None, picture: Path | None = None) -> None:
        self._picture = picture
        # A recorded terminal would hold every frame of the live table, so a picture shows the plain lines.
        self._console = console or Console(record=picture is not None, force_terminal=False if picture else None)
        if not self._console.is_terminal:
            # rich assumes 80 columns for a pipe, which would cut the tables in a CI log.
            self._console = Console(file=self._console.file, width=120, color_system=None, record=self._console.record)
        # No automatic refresh: rich's thread would read the history beside this one.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._started = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def due(self) -> bool:
        """Return whether it is time to draw. Check it first, because counting the rows is expensive."""
        return self.elapsed - self._drawn > (0.2 if self._console.is_terminal else _LINES_EVERY)

    def progress(self, rows: Sequence[Row], inside: Sequence[Fact]) -> None:
        self._drawn = self.elapsed
        if self._console.is_terminal:
            bodies = Text(f"in their bodies: {_names(inside)}", no_wrap=True, overflow="ellipsis")
            self._live.update(Group(self._table(rows, f"{self.elapsed:.0f} s"), bodies), refresh=True)
        else:
            sums = _total(rows)
            self.say(
                f"published {sums.published}, ran {sums.ran}, skipped {sums.skipped}, "
                f"postponed {sums.postponed}, overlaps {sums.overlaps}, sent twice {sums.sent_twice}"
            )

    def say(self, text: str, style: str = "") -> None:
        self._console.print(
            f"[{self.elapsed:5.1f} s] {text}", style=style, markup=False, highlight=False, soft_wrap=True
        )

    def result(self, rows: Sequence[Row], ledgers: Sequence[LedgerRow]) -> None:
        self._console.print(self._table([*rows, _total(rows)], f"after {self.elapsed:.0f} s"))
        if ledgers:
            self._console.print(_ledger_table([*ledgers, total(ledgers)]))

    def answers(self, answers: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Print commands and what they printed while the server was up."""
        for command, lines in answers:
            for line in ("", f"$ {command}", *lines):
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def save_picture(self) -> None:
        """Save the output as an SVG if a file was given for it."""
        if self._picture:
            self._console.save_svg(str(self._picture), title="make demo", code_format=_PICTURE)

    def _table(self, rows: Sequence[Row], title: str) -> Table:
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("task", no_wrap=True)
        names = (
            "published",
            "ran",
            "skipped",
            "postponed",
            "held",
            "recognised",
            "overlaps",
            "sent twice",
            "freed in",
        )
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            ends = (row.published, row.ran, row.skipped, row.postponed, row.held, row.recognised)
            table.add_row(
                row.task.removeprefix("shop."),
                *map(str, (*ends, row.overlaps, row.sent_twice)),
                "-" if row.free_after is None else f"{row.free_after:.2f} s",
                style="red" if row.overlaps or row.sent_twice else "",
            )
        return table


def _ledger_table(rows: Sequence[LedgerRow]) -> Table:
    table = Table(title="ledgers", title_justify="left", box=None, pad_edge=False)
    table.add_column("account", no_wrap=True)
    names = ("published", "posted", "out of order", "lost", "posted twice", "wrong balance", "sent back by the kill")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        faults = (row.out_of_order, row.lost, row.posted_twice, row.wrong_balance)
        figures = (row.published, row.posted, *faults, row.sent_back)
        table.add_row(row.account, *map(str, figures), style="red" if any(faults) else "")
    return table


def _names(inside: Sequence[Fact]) -> str:
    """Return each body with its age, which for a report exceeds its ttl."""
    now = time.monotonic()
    names = (f"{fact.task.removeprefix('shop.')} {fact.subject}".rstrip() for fact in inside)
    ages = (f"({now - fact.at:.1f} s)" for fact in inside)
    return ", ".join(map(" ".join, zip(names, ages, strict=True))) or "none"


def _total(rows: Sequence[Row]) -> Row:
    freed = [row.free_after for row in rows if row.free_after is not None]
    return Row(
        "all",
        sum(row.published for row in rows),
        sum(row.ran for row in rows),
        sum(row.skipped for row in rows),
        sum(row.postponed for row in rows),
        sum(row.held for row in rows),
        sum(row.recognised for row in rows),
        sum(row.overlaps for row in rows),
        sum(row.sent_twice for row in rows),
        max(freed, default=None),
    )
