"""Part 1: cost of one lock for the caller and for the server."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import redis
from celery import Celery

from benchmarks.tables import percentile, table
from benchmarks.targets import Target
from celery_dlock import Lock
from celery_dlock.store.redis.scripts import SCRIPTS
from tests.support.servers import Server

#: Locks held at once to measure the memory of one.
WEIGHED = 2000

EMPTY, FLOOR, OURS = "2 bare EVALSHA, empty", "2 bare EVALSHA, our scripts", "our Lock"


@dataclass
class Case:
    """One thing to time.

    Args:
        name: The name in the table.
        call: Runs one cycle.
        hold: Acquires the lock of a number, to measure its memory, and returns a function that releases it.
    """

    name: str
    call: Callable[[], object]
    hold: Callable[[int], Callable[[], object]] | None = None
    micros: list[float] = field(default_factory=list)

    def run(self, times: int, *, timed: bool) -> None:
        for _ in range(times):
            began = time.perf_counter()
            self.call()
            took = time.perf_counter() - began
            if timed:
                self.micros.append(took * 1e6)

    @property
    def p50(self) -> float:
        return percentile(self.micros, 50)

    @property
    def p99(self) -> float:
        return percentile(self.micros, 99)


def measure(server: Server, cycles: int, block: int) -> list[Target]:
    """Print the cost of a cycle, and return the targets."""
    # The clients have their defaults, as in an application.
    with redis.Redis.from_url(server.url()) as client, server.client() as observer:
        cases = _cases(server, client)
        for turn in range(-1, cycles // block):
            # Rotate the order, so that each case follows each other one equally often. The first turn warms up.
            first = turn % len(cases)
            for case in cases[first:] + cases[:first]:
                case.run(block, timed=turn >= 0)
        seen = {case.name: _commands(case, observer) for case in cases}
        weights = {case.name: _weight(case, observer) for case in cases}
    by_name = {case.name: case for case in cases}
    floor = by_name[FLOOR].p50
    rows = [
        [
            case.name, f"{case.p50:.0f}", f"{case.p99:.0f}", f"{case.p50 / floor:.2f}",
            str(seen[case.name].trips), str(seen[case.name].inner), weights[case.name],
        ]
        for case in cases
    ]  # fmt: skip
    head = ["cycle", "p50 µs", "p99 µs", "x floor", "round trips", "commands in scripts", "bytes held"]
    print(f"One cycle, {len(cases[0].micros)} of each, {block} in turn\n\n{table(head, rows)}\n")
    # For information: the floor above runs the same scripts in the server, this one runs empty scripts.
    print(f"  our Lock by 2 EVALSHA of empty scripts: {by_name[OURS].p50 / by_name[EMPTY].p50:.2f}\n")
    return [
        Target("our acquire and release, round trips", seen[OURS].trips, 2),
        Target("our acquire and release, p50 by that of the floor", by_name[OURS].p50 / floor, 1.0),
    ]


def _cases(server: Server, client: redis.Redis) -> list[Case]:
    return [Case("PING", client.ping), *_bare(client), _ours(server), _theirs(client)]


def _bare(client: redis.Redis) -> Iterator[Case]:
    """Yield two scripts through redis-py with prepared keys and arguments: empty ones, and those of our lock."""
    nothing = client.script_load("return 1")
    acquire, release = (client.script_load(SCRIPTS[name].variant().source.decode()) for name in ("acquire", "release"))
    keys = "bare:lock", "bare:last", "bare:tombstone"

    def empty() -> None:
        client.evalsha(nothing, 1, "bare")
        client.evalsha(nothing, 1, "bare")

    def same() -> None:
        client.evalsha(acquire, 3, *keys, "o.1", "30000", "", "0", "0", "", "", "node 1")
        client.evalsha(release, 2, *keys[:2], "o.1")

    yield Case(EMPTY, empty)
    yield Case(FLOOR, same)


def _ours(server: Server) -> Case:
    app = Celery("bench-calls", set_as_current=False)
    app.conf.dlock_url = server.url()
    lock = Lock("cycle", app=app)

    def cycle() -> None:
        assert lock.acquire()
        lock.release()

    def hold(number: int) -> Callable[[], object]:
        held = Lock(f"held:{number}", app=app)
        assert held.acquire()
        return held.release

    return Case(OURS, cycle, hold)


def _theirs(client: redis.Redis) -> Case:
    lock = client.lock("cycle", timeout=30)

    def cycle() -> None:
        assert lock.acquire()
        lock.release()

    def hold(number: int) -> Callable[[], object]:
        held = client.lock(f"held:{number}", timeout=30)
        assert held.acquire()
        release: Callable[[], object] = held.release
        return release

    return Case("redis-py's Lock", cycle, hold)


@dataclass(frozen=True)
class _Commands:
    """Commands of a cycle: ``trips`` are sent by the client one by one, ``inner`` are run by its scripts."""

    trips: int
    inner: int


def _commands(case: Case, observer: redis.Redis) -> _Commands:
    with observer.monitor() as monitor:  # type: ignore[no-untyped-call]  # untyped in redis-py
        observer.echo("the cycle begins")
        case.call()
        observer.echo("the cycle ends")
        seen = list(itertools.takewhile(lambda command: "cycle ends" not in command["command"], monitor.listen()))
    seen = list(itertools.dropwhile(lambda command: "cycle begins" not in command["command"], seen))[1:]
    inner = sum(command["client_type"] == "lua" for command in seen)
    return _Commands(len(seen) - inner, inner)


def _weight(case: Case, observer: redis.Redis) -> str:
    """Return the server's memory for one held lock in bytes, with all its keys."""
    if case.hold is None:
        return "-"
    observer.flushall()
    # Hold many first, so that the keys shared by all locks exist already.
    held = [case.hold(number) for number in range(WEIGHED)]
    before = _used(observer)
    held += [case.hold(number) for number in range(WEIGHED, 2 * WEIGHED)]
    weight = (_used(observer) - before) / WEIGHED
    for release in reversed(held):
        release()
    return f"{weight:.0f}"


def _used(observer: redis.Redis) -> int:
    used: int = observer.info("memory")["used_memory"]
    return used
