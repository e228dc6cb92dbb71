"""Walk every order of the steps of a small model, breadth first, until a fault is found or all states are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

S = TypeVar("S")


class Verdict(NamedTuple):
    """The fault, the steps that lead to it by the shortest way, and the numbers of states and of ends."""

    fault: str
    path: tuple[str, ...]
    states: int
    ends: int


def explore(first: S, steps: Callable[[S], Iterable[tuple[str, S]]], wrong: Callable[[S, bool], str]) -> Verdict:
    """Explore all states.

    Args:
        first: The first state.
        steps: Returns each step from a state: its label, and the state after it.
        wrong: Returns the fault of a state, "" for none. Its second argument says whether no step leads on.
    """
    came: dict[S, tuple[str, S]] = {first: ("", first)}
    level, ends = [first], 0
    while level:
        following: list[S] = []
        for s in level:
            moves = list(steps(s))
            ends += not moves
            if fault := wrong(s, not moves):
                return Verdict(fault, _path(came, s), len(came), ends)
            for label, after in moves:
                if after not in came:
                    came[after] = (label, s)
                    following.append(after)
        level = following
    return Verdict("", (), len(came), ends)


def _path(came: dict[S, tuple[str, S]], s: S) -> tuple[str, ...]:
    labels: list[str] = []
    while came[s][0]:
        label, s = came[s]
        labels.append(label)
    return tuple(reversed(labels))
