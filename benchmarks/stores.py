"""The cost of a lock in each kind of store: `make bench-stores`, about five minutes.

Every store is measured in the same run, beside what its driver can do at least. That is a bare upsert and update of one
row, or SET and DEL. Exits with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psycopg
import pymysql

from benchmarks.contention import handoffs, jain
from benchmarks.tables import table
from benchmarks.targets import Target
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import LockStore, ReleaseRequest
from celery_dlock.store.engine.backend import Wanted
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.model import Acquired, AcquireRequest, Identity, QueueRequest, Renewal, Requester
from tests.support import mysql_stores, postgresql_stores
from tests.support.mariadb import running_mariadb
from tests.support.polling import eventually
from tests.support.postgresql import running_postgresql
from tests.support.processes import kill_session, spawn, tail
from tests.support.servers import Server
from tests.support.stores import store_at

ROOT = Path(__file__).parent.parent
PROCESSES, THREADS = 4, 8
#: Waiting messages behind which a hand-off is measured.
WAITING = 10, 100_000
REQUEST = AcquireRequest(Requester("app.tasks.import_feed", "a" * 36, "celery@host-1", "1234"), Identity("f" * 32))

#: Acquires and releases one row, as barely as the driver can. The argument is a number.
Floor = Callable[[int], object]


class Kind(NamedTuple):
    """A kind of store.

    Args:
        url: Its ``dlock_url``.
        floor: The barest acquire and release; None if there is none.
        statements: Returns the number of statements that its server has executed.
        targets: The limits of its figures, by name.
    """

    url: str
    floor: Floor | None
    statements: Callable[[], int]
    targets: Mapping[str, float]


class Found(NamedTuple):
    """The figures of one store. Those of time are milliseconds."""

    plain: float
    ratio: float
    section: float
    handoff: float
    statements: float
    jain: float
    longest: float
    overlaps: float
    renew: float
    idle: float
    few: float
    many: float


HEAD = ("store", "plain ms", "by floor", "section ms", "hand-off ms", "statements", "Jain", "longest ms", "overlaps",
        "renew 1,000 ms", "idle/s", f"over {WAITING[0]} ms", f"over {WAITING[1]:,} ms")  # fmt: skip


@contextmanager
def memory(_: Path) -> Iterator[Kind]:
    yield Kind("memory://", None, lambda: 0, {})


@contextmanager
def redis(folder: Path) -> Iterator[Kind]:
    with Server(folder / "redis") as server, server.client() as client:

        def statements() -> int:
            stats: Any = client.info("commandstats")
            own = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_blpop")
            return sum(facts["calls"] for name, facts in stats.items() if name in own)

        def floor(number: int) -> object:
            return client.set("floor", number, nx=True, px=30_000), client.delete("floor")

        yield Kind(server.url(1), floor, statements, {})


def _postgresql(commit: str, targets: dict[str, float]) -> Callable[[Path], Any]:
    @contextmanager
    def kind(_: Path) -> Iterator[Kind]:
        durable = ("-c", "fsync=on", "-c", "shared_preload_libraries=pg_stat_statements", "-c", "max_connections=200")
        with (
            running_postgresql(*durable) as url,
            postgresql_stores.migrated_schema(url) as schema,
            psycopg.connect(url, autocommit=True, options=f"-c synchronous_commit={commit}") as floor,
        ):
            floor.execute("CREATE EXTENSION pg_stat_statements")
            floor.execute(
                "CREATE TABLE floor (name text PRIMARY KEY, owner text, until_us bigint) WITH (fillfactor = 50)"
            )
            now = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
            upsert = (
                f"INSERT INTO floor AS f VALUES (%s, %s, {now} + %s) ON CONFLICT (name) DO UPDATE SET"
                f" owner = excluded.owner, until_us = excluded.until_us WHERE f.until_us < {now} RETURNING 1"
            )
            update = "UPDATE floor SET until_us = 0 WHERE name = %s AND owner = %s RETURNING 1"

            def bare(number: int) -> object:
                owner = f"o{number}"
                return (
                    floor.execute(upsert, ("n", owner, 30_000_000)).fetchone(),
                    floor.execute(update, ("n", owner)).fetchone(),
                )

            def statements() -> int:
                query = "SELECT sum(calls) FROM pg_stat_statements JOIN pg_roles ON userid = oid WHERE rolname = %s"
                ((count,),) = floor.execute(query, (postgresql_stores.USER,)).fetchall()
                return int(count or 0)

            options = {"synchronous_commit": commit}
            yield Kind(postgresql_stores.url_of(url, schema, **options), bare, statements, targets)

    return kind


@contextmanager
def mariadb(_: Path) -> Iterator[Kind]:
    with (
        running_mariadb("--innodb-flush-method=fsync", "--max-connections=200") as server,
        mysql_stores.migrated_database(server) as database,
        closing(
            pymysql.connect(port=server.port, host="127.0.0.1", user="root", database=database, autocommit=True)
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("CREATE TABLE floor (name VARBINARY(240) PRIMARY KEY, owner VARBINARY(200), until_us BIGINT)")
        now = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"
        upsert = (
            f"INSERT INTO floor VALUES (%s, %s, {now} + %s) ON DUPLICATE KEY UPDATE"  # no values
            " owner = IF(until_us = 0, VALUES(owner), owner),"
            " until_us = IF(owner = VALUES(owner), VALUES(until_us), until_us) RETURNING owner"
        )

        def bare(number: int) -> object:
            owner = f"o{number}"
            taken = cursor.execute(upsert, ("n", owner, 30_000_000)), cursor.fetchone()
            return taken, cursor.execute("UPDATE floor SET until_us = 0 WHERE name = %s AND owner = %s", ("n", owner))

        def statements() -> int:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
            ((_, count),) = cursor.fetchall()
            return int(count)

        targets = {"ratio": 1.5, "handoff": 3.0, "jain": 0.99, "renew": 15.0, "idle": 1.0, "many": 1.5}
        yield Kind(mysql_stores.url_of(server, database), bare, statements, targets)


_POSTGRESQL = {
    "ratio": 1.15, "statements": 2.5, "jain": 0.999, "longest": 100.0, "renew": 15.0, "idle": 1.0, "many": 1.5
}  # fmt: skip
KINDS: dict[str, Callable[[Path], Any]] = {
    "memory": memory,
    "redis": redis,
    "postgresql": _postgresql("on", _POSTGRESQL | {"handoff": 1.2}),
    "postgresql, synchronous_commit=off": _postgresql("off", _POSTGRESQL | {"handoff": 0.8}),
    "mariadb": mariadb,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run: the figures are rough")
    parser.add_argument("--only", choices=KINDS, action="append", help="measure this store; may be repeated")
    asked = parser.parse_args()
    rows, targets = [], []
    for name in asked.only or KINDS:
        with tempfile.TemporaryDirectory(prefix="dlock-bench-") as folder, KINDS[name](Path(folder)) as kind:
            found = measured(kind, Path(folder), quick=asked.quick)
        rows.append((name, *(f"{figure:.4f}" if figure < 1 else f"{figure:.2f}" for figure in found)))
        figures = found._asdict() | {"many": found.many / found.few}
        targets += [
            Target(f"{name}: {what}", figures[what], limit, floor=what == "jain")
            for what, limit in kind.targets.items()
        ]
        targets.append(Target(f"{name}: overlaps", found.overlaps, 0))
        print("\n" + table(HEAD, rows) + "\n", flush=True)
    print(*targets, sep="\n")
    return 0 if all(target.reached for target in targets) else 1


def measured(kind: Kind, folder: Path, *, quick: bool) -> Found:
    with closing(store_at(kind.url, timeout=10)) as store:
        own, ratio = plain(store, kind.floor, 300 if quick else 1500)
        sections = contention(kind, 2.0 if quick else 5.0)
        renewed = renewals(store)
        idle = idle_worker(kind, folder, 3.0 if quick else 10.0)
        few, many = (handed_over(store, count if not quick else min(count, 1000)) for count in WAITING)
    return Found(own, ratio, *sections, renewed, idle, few, many)


def plain(store: LockStore, floor: Floor | None, count: int) -> tuple[float, float]:
    """Return the time of an acquire and release, and its ratio to the floor. Both alternate in blocks."""
    name = LockName("app.tasks.import_feed:x=1:" + "d" * 32, 1)

    def ours(number: int) -> object:
        acquisition = f"host-1:1234:abcdef.{number}"
        got = store.acquire(name, acquisition, 30_000, REQUEST)
        assert isinstance(got, Acquired)
        return store.release(name, acquisition, ReleaseRequest(identity="f" * 32))

    cycles = [ours] if floor is None else [ours, floor]
    times: list[list[float]] = [[] for _ in cycles]
    number = 0
    for _ in range(20):
        for cycle, mine in zip(cycles, times, strict=True):
            for _ in range(count // 20):
                number += 1
                began = time.perf_counter()
                cycle(number)
                mine.append(time.perf_counter() - began)
    medians = [median(mine) * 1000 for mine in times]
    return medians[0], medians[0] / medians[-1]


def contention(kind: Kind, seconds: float) -> tuple[float, float, float, float, float, float]:
    """Let 32 threads of 4 processes take turns on one lock without a body."""
    processes = 1 if kind.url == "memory://" else PROCESSES
    threads = PROCESSES * THREADS // processes
    command = [sys.executable, "-m", "benchmarks.contention_member", "our Lock", kind.url, str(threads), "0",
               str(seconds)]  # fmt: skip
    with ExitStack() as stack:
        members = [
            stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for _ in range(processes)
        ]
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == "ready\n"
        before = kind.statements()
        for member in members:
            assert member.stdin is not None
            member.stdin.write("go\n")
            member.stdin.flush()
        reports = [json.loads(member.communicate(timeout=seconds + 60)[0]) for member in members]
        statements = kind.statements() - before
    by_thread = [turns for report in reports for turns in report["turns"]]
    count = sum(map(len, by_thread))
    longest = max(
        [got - asked for turns in by_thread for asked, got, _ in turns]
        + [waited for report in reports for waited in report["unserved"]]
    )
    between, _, overlaps = handoffs(
        [(got, done, number) for number, turns in enumerate(by_thread) for _, got, done in turns]
    )
    return (
        seconds / count * 1e3, median(between) * 1e3, statements / count, jain([len(turns) for turns in by_thread]),
        longest * 1e3, overlaps,
    )  # fmt: skip


def renewals(store: LockStore) -> float:
    names = [LockName(f"renewed{number}:{number:032x}", number % 1024) for number in range(1000)]
    for name in names:
        store.acquire(name, f"host-1:1234:abcdef.{name.text}", 60_000, REQUEST)
    renewed = [Renewal(name, f"host-1:1234:abcdef.{name.text}", 60_000) for name in names]
    times = []
    for _ in range(15):
        began = time.perf_counter()
        answers = store.renew(renewed)
        times.append(time.perf_counter() - began)
        assert answers == [True] * len(names)
    for one in renewed:
        store.release(one.name, one.acquisition, ReleaseRequest())
    return median(times) * 1000


def idle_worker(kind: Kind, folder: Path, seconds: float) -> float:
    """Return the statements a second of a worker without calls."""
    if kind.url == "memory://":
        return 0.0
    os.environ["DLOCK_BENCH_URL"] = kind.url
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.stores_app", "worker", "-c", "2", "-l", "INFO"]
    log = folder / "worker.log"
    worker = spawn(command, log)
    try:
        eventually(lambda: "ready" in tail(log), 60, message="the worker does not start")
        time.sleep(3)
        before = kind.statements()
        time.sleep(seconds)
        return (kind.statements() - before) / seconds
    finally:
        kill_session(worker)


def handed_over(store: LockStore, count: int) -> float:
    """Return the time in which a release grants a queue's lock to the next of so many messages, which takes it."""
    name, entry = LockName(f"queue{count}:" + "e" * 32, 5), "message" * 20
    identities = {Identity(f"{number:032x}").digest: Identity(f"{number:032x}") for number in range(count)}
    _acquire(store, name, Identity("first"), QueueRequest())
    if isinstance(store, EngineStore):
        _park_at_once(store, name, list(identities), entry)
    else:
        for identity in identities.values():
            store.acquire(name, f"{identity.task_id}.0", 600_000, _queued(identity, QueueRequest(entry)))
    times, holder = [], Identity("first")
    for _ in range(min(count, 30) - 1):
        began = time.perf_counter()
        released = store.release(name, f"{holder.task_id}.1", ReleaseRequest(queue=True, identity=holder.digest))
        assert released.granted is not None
        store.confirm_publish(name, released.granted.identity, 60_000)
        holder = identities[released.granted.identity]
        _acquire(store, name, holder, QueueRequest(entry, grant_id=released.granted.grant_id))
        times.append(time.perf_counter() - began)
    return median(times) * 1000


def _park_at_once(store: EngineStore, name: LockName, identities: list[str], entry: str) -> None:
    """Park messages in one transaction: 100,000 acquires would take minutes."""

    def park(records: Any) -> None:
        for rank, identity in enumerate(identities):
            records.put_entry(identity, entry)
            records.put_in("waiting", identity, rank)
        lock = records.lock()
        lock.has_waiters = True
        records.put_lock(lock)

    store.run(name, park, Wanted(within=300))


def _acquire(store: LockStore, name: LockName, identity: Identity, queue: QueueRequest) -> None:
    got = store.acquire(name, f"{identity.task_id}.1", 600_000, _queued(identity, queue))
    assert isinstance(got, Acquired), got


def _queued(identity: Identity, queue: QueueRequest) -> AcquireRequest:
    return REQUEST._replace(identity=identity, queue=queue)


if __name__ == "__main__":
    sys.exit(main())
