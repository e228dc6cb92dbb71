"""The command ``watch``: locks and waiters in the terminal, until Ctrl-C."""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from ..reports.documents import iso
from ..reports.durations import shown_duration
from ..reports.facts import Fact
from ..reports.tables import LOCKS, WAITERS
from ..utils.text import printable
from .options import DURATION, option
from .session import session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..control import LockControl

__all__ = ["watch"]


# Fewer columns than those of the lists, so that names have room in 80 columns. A name begins with the task.
_AGE: Final = Fact("age", "Age", "span", lambda view: view.at - view.since)
_LOCKS: Final = [*LOCKS.pick("name", "states", "task_id", "worker"), _AGE, *LOCKS.pick("waiting")]
_WAITERS: Final = WAITERS.pick("name", "position", "state", "task_id", "age")
#: Lines of the view beside the rows of its tables: titles, headings, the line of counts and a blank one.
_FRAME: Final = 8
#: The largest number of waiters, unknown outcomes and dead letters that are counted for a view.
_COUNTED: Final = 1000


@click.command()
@option("--task", help="Only names that this task holds, has run or has claimed.")
@option("--name", help="Only names that match this pattern, such as 'shop.*'.")
@option("--state", default="held,granted,kept", show_default=True, help="Only these states, with commas.")
@option("--every", type=DURATION, default="2s", show_default=True, help="The time between two readings of the store.")
def watch(task: str | None, name: str | None, state: str, every: float) -> None:
    """Show locks and waiters in the terminal until Ctrl-C.

    If the store does not answer, the view says so and tries again. It needs the package rich.
    """
    rich = _import_rich()
    console = rich.console.Console()
    if not console.is_terminal:
        raise click.UsageError("watch needs a terminal: in a pipe, use list and queue")
    with session() as opened, _ends_at_signals():
        view = View(opened.control, rich, task=task, name=name, states=state.split(","))
        # No automatic refresh: it would draw in a thread of its own.
        with rich.live.Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(view.read(console.size.height), refresh=True)
                time.sleep(max(0.1, every))


def _import_rich() -> Any:
    try:
        import rich.console  # noqa: PLC0415  # an optional dependency
        import rich.live  # noqa: PLC0415
        import rich.table  # noqa: PLC0415
        import rich.text  # noqa: PLC0415
    except ImportError as error:
        raise click.UsageError("watch needs the package rich: pip install 'celery-dlock[watch]'") from error
    return rich


@contextmanager
def _ends_at_signals() -> Iterator[None]:
    """Return a context that ends with exit code 0 at Ctrl-C and SIGTERM, once rich has restored the terminal."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        click.get_current_context().exit(0)
    finally:
        signal.signal(signal.SIGTERM, before)


class View:
    """The content of the terminal. :meth:`read` makes it anew, and keeps the last one for an outage of the store.

    Args:
        control: Reads the store.
        rich: The package rich.
        task: Only locks of this task; None: of all.
        name: Only locks whose names match this pattern; None: all.
        states: Only locks in these states.
    """

    def __init__(
        self, control: LockControl, rich: Any, *, task: str | None, name: str | None, states: list[str]
    ) -> None:
        self._control = control
        self._rich = rich
        self._filter: dict[str, Any] = {"task": task, "name": name, "state": states}
        self._task = task
        self._tables: list[Any] = []
        self._read_at = "never"

    def read(self, height: int) -> Any:
        """Return what the store has now. If it does not answer, return the last content with the error above it."""
        from ..errors import StoreUnavailable  # noqa: PLC0415  # every celery command imports this module

        now = iso(time.time())
        try:
            self._tables, self._read_at = self._read(max(4, height - _FRAME)), now
        except StoreUnavailable as error:
            parts = [self._text(f"{now}  the store does not answer, trying again: {error}", "bold red")]
            if self._tables:
                parts.append(self._text(f"below: as it was at {self._read_at}", "dim"))
            return self._rich.console.Group(*parts, *self._tables)
        return self._rich.console.Group(*self._tables)

    def _text(self, text: str, style: str = "") -> Any:
        return self._rich.text.Text(printable(text), style=style)

    def _read(self, rows: int) -> list[Any]:
        page = self._control.locks(**self._filter, limit=rows)
        waiters = [one for one in self._control.waiting(limit=_COUNTED) if self._task in (None, one.task)]
        unknown = self._control.unknown_outcomes(task=self._task, limit=_COUNTED).items
        letters = self._control.dead_letters(task=self._task, limit=_COUNTED).items
        views = sorted(page.items, key=lambda view: view.since)
        locks = f"{len(views)}{'+' if page.cursor else ''}"
        counts = " · ".join(
            f"{text} {number}{'+' if number == _COUNTED else ''}"
            for text, number in (
                ("waiting", len(waiters)),
                ("unknown outcomes", len(unknown)),
                ("dead letters", len(letters)),
            )
        )
        head = self._text(f"{iso(time.time())}  locks {locks} · {counts} · Ctrl-C ends", "bold")
        shown = min(len(waiters), max(2, rows - len(views)))
        # A page has the names in the order of the keys, so there may be older locks on later pages.
        title = "Some of the locks, their oldest first" if page.cursor else "Locks, the oldest first"
        return [
            head,
            self._table(title, _LOCKS, views, rows - shown),
            *([self._table("Waiters", _WAITERS, waiters, shown)] if waiters else []),
        ]

    def _table(self, title: str, columns: list[Fact], items: list[Any], rows: int) -> Any:
        table = self._rich.table.Table(title=title, title_justify="left", box=None)
        for fact in columns:
            heading = fact.title.upper()
            narrow = fact.kind in ("states", "span", "number") or fact.key == "state"
            table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=len(heading) if narrow else None)
        for item in items[:rows]:
            # As Text, because rich would read [square brackets] of a string as its own markup.
            table.add_row(*(self._text(fact.text(item, shown_duration) or "-") for fact in columns))
        if len(items) > rows:
            table.caption = f"and {len(items) - rows} more"
        return table
