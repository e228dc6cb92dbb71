"""What is to be reached, and whether it was."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One limit and what was measured.

    Args:
        what: the law, for people.
        measured: the figure.
        limit: the figure may be this large at most, or (``floor``) must be larger than this.
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
