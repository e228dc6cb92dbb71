"""Targets of the benchmarks: a limit, and the value reached."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A limit and the measured value.

    Args:
        what: Description of the value.
        measured: The value.
        limit: The most that the value may be. With ``floor``, the value must exceed it.
        floor: The limit is a lower one.
    """

    what: str
    measured: float
    limit: float
    floor: bool = False

    @property
    def reached(self) -> bool:
        return self.measured > self.limit if self.floor else self.measured <= self.limit

    def __str__(self) -> str:
        relation = "above" if self.floor else "at most"
        return (
            f"{'reached' if self.reached else 'MISSED '}  {self.what}: {self.measured:.2f}, {relation} {self.limit:g}"
        )
