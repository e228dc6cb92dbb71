"""The values of the queue's model.

Time is a stamp: the server's time at some step of the test, plus microseconds. Stamps are compared, never computed.
The test learns the server's number for each of them. From then on, that number must be seen wherever the stamp is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Stamp(NamedTuple):
    """The server's time at a step, plus so many microseconds."""

    step: int
    plus: int = 0


#: A time that the test made pass.
PAST = Stamp(-1)


#: What the laws leave open.
ANY = object()


@dataclass(frozen=True)
class Ask:
    """One acquisition. ``identity``: "" for a plain ``Lock``; ``queues``: it names the queue's keys."""

    acquisition: str
    identity: str = ""
    task_id: str = ""
    redelivered: bool = False
    republished: bool = False
    rank: Stamp | None = None
    after: Stamp | None = None
    queues: bool = True
    entry: str = ""
    limit: int = 0
    evicts: bool = False
    turn: Stamp | None = None
    waits: bool = False
    unsure: bool = False


@dataclass
class Held:
    ask: Ask
    token: Stamp
    word: bool
    crowded: bool
    wake: bool = False


@dataclass
class Granted:
    identity: str
    rank: Stamp
    turn: Stamp
    due: Stamp
    granter: str
    published: bool = False
    wake: bool = False
    buried: str = ""


@dataclass
class Bucket:
    """The common part of all lock names of one bucket."""

    done: dict[str, Stamp] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    last: Stamp | None = None
