"""All pages of the lock names in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..store.operator_model import LockView, State

if TYPE_CHECKING:
    from ..store.operator import OperatorStore

__all__ = ["scan_all"]


def scan_all(
    store: OperatorStore,
    states: Iterable[State],
    accepted: Callable[[LockView], bool] = lambda _: True,
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[LockView]:
    """Yield the lock names that are in one of the states, each once. Each tick of a name is an entry of its own.

    Args:
        store: The store.
        states: The states.
        accepted: Returns whether to yield a view.
        wanted: Returns whether to look at a lock name.
    """
    cursor, seen = None, set[tuple[str, str]]()
    while cursor != "":
        page = store.scan(states, cursor or "", 1000, wanted, accepted)
        for view in page.items:
            entry = (view.name, view.run.tick if view.run else "")
            if entry not in seen:
                seen.add(entry)
                yield view
        cursor = page.cursor
