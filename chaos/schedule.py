"""The schedule of faults and their targets: the same for the same seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

#: Seconds of a lease in tests.support.apps.chaos; pauses are shorter or longer than it.
TTL = 2.0
SHORT, LONG, MIDDLE = (0.2, 0.8), (TTL + 0.5, TTL + 2.5), (0.3, 3.0)
MOMENT = (0.0, 0.0)


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        target: "worker", "store", "network" (between workers and store) or "broker".
        weight: How often it comes, compared with the others.
        lasts: Seconds, least and most.
        rest: Seconds that its target is then left alone: a worker has to start again.
    """

    target: str
    weight: int
    lasts: tuple[float, float] = MOMENT
    rest: float = 0.3


KINDS = {
    "kill child": Kind("worker", 12),
    "exit in body": Kind("worker", 6),
    "kill main": Kind("worker", 3, rest=5.0),
    "kill group": Kind("worker", 2, rest=5.0),
    "SIGTERM": Kind("worker", 2, rest=8.0),
    "SIGQUIT": Kind("worker", 2, rest=6.0),
    "pause child, short": Kind("worker", 4, SHORT),
    "pause child, long": Kind("worker", 4, LONG),
    "pause worker, short": Kind("worker", 6, SHORT),
    "pause worker, long": Kind("worker", 5, LONG),
    "CLIENT KILL": Kind("store", 6),
    "SCRIPT FLUSH": Kind("store", 5),
    "pause store, short": Kind("store", 5, SHORT),
    "pause store, long": Kind("store", 2, LONG, rest=2.0),
    "restart store": Kind("store", 3, rest=1.0),
    "kill store": Kind("store", 2, rest=1.0),
    "FLUSHALL": Kind("store", 1),
    "cut": Kind("network", 4, SHORT),
    "black hole": Kind("network", 4, MIDDLE, rest=1.0),
    "cut replies": Kind("network", 6, SHORT),
    "broker CLIENT KILL": Kind("broker", 3, rest=1.0),
    "restart broker": Kind("broker", 1, rest=10.0),
}
#: Those whose target is one process of a prefork pool.
OF_A_CHILD = ("kill child", "exit in body", "pause child, short", "pause child, long")
#: Those of each target that may strike while another one lasts.
TARGETS = ("store", "network", "broker")


@dataclass(frozen=True)
class Fault:
    """One fault of the schedule.

    Attributes:
        at: Seconds from the start.
        kind: A name in `KINDS`.
        worker: Place of the worker that it strikes; None for the servers.
        lasts: Seconds.
        choice: From 0 to 1: which of the children.
    """

    at: float
    kind: str
    worker: int | None
    lasts: float
    choice: float

    def __str__(self) -> str:
        whom = "" if self.worker is None else f" of worker {self.worker}"
        return f"{self.at:7.2f} s  {self.kind}{whom}" + (f" for {self.lasts:.2f} s" if self.lasts else "")


def schedule(seed: int, seconds: float, every: float, pools: list[str], kinds: list[str] | None = None) -> list[Fault]:
    """Faults for so many seconds, one every `every` s on average; a target has one at a time.

    Args:
        pools: The pool of each worker, by place.
        kinds: Only these; default: all.
    """
    chance = random.Random(seed)
    found = _faults(chance, seconds, every, pools, kinds or list(KINDS))
    return sorted(found, key=lambda fault: fault.at)


def _faults(chance: random.Random, seconds: float, every: float, pools: list[str], names: list[str]) -> Iterator[Fault]:
    at, busy = 0.0, dict.fromkeys([*TARGETS, *map(str, range(len(pools)))], 0.0)
    while (at := at + chance.uniform(0.4, 1.6) * every) < seconds:
        kind = chance.choices(names, [KINDS[name].weight for name in names])[0]
        worker = _worker(chance, kind, pools) if KINDS[kind].target == "worker" else None
        lasts, choice = round(chance.uniform(*KINDS[kind].lasts), 2), chance.random()
        target = KINDS[kind].target if worker is None else str(worker)
        # Not another kind in its place: the rare ones are those that rest long, and would become rarer.
        start = max(at, busy[target])
        if start < seconds:
            busy[target] = start + lasts + KINDS[kind].rest
            yield Fault(round(start, 2), kind, worker, lasts, choice)


def _worker(chance: random.Random, kind: str, pools: list[str]) -> int:
    places = [place for place, pool in enumerate(pools) if pool == "prefork" or kind not in OF_A_CHILD]
    return chance.choice(places)
