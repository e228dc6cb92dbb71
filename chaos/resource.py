"""A resource that refuses late holders: one row per name, with the newest token that wrote to it."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

#: The seats of each name that has seats (``limit``).
LIMIT = 3
#: Seconds that a writer waits for another; one may be stopped in the middle of its transaction.
TRIES = 60.0

TABLES = """
CREATE TABLE resource (name TEXT PRIMARY KEY, token INTEGER NOT NULL);
CREATE TABLE landed (seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT, token INTEGER, task TEXT);
CREATE TABLE exits (task TEXT PRIMARY KEY);
"""


def seat_of(name: str, seat: int) -> str:
    """Return the name under which a seat is judged: at most one body at a time, with a fence of its own."""
    return f"{name}/{seat}"


def create(path: str | Path, names: list[str]) -> None:
    with _opened(path) as db:
        db.executescript(TABLES)
        seats = [seat_of(name, seat) for name in names for seat in range(LIMIT)]
        db.executemany("INSERT INTO resource VALUES (?, 0)", [(name,) for name in (*names, *seats)])


def write(path: str | Path, name: str, token: int, task: str) -> bool:
    """Write to the resource as a task does. Return False if a newer holder has written before."""
    with _opened(path) as db:
        db.execute("BEGIN IMMEDIATE")
        fenced = "UPDATE resource SET token = ? WHERE name = ? AND token <= ?"
        if not db.execute(fenced, (token, name, token)).rowcount:
            db.rollback()
            return False
        db.execute("INSERT INTO landed (name, token, task) VALUES (?, ?, ?)", (name, token, task))
        db.commit()
        return True


def landed(path: str | Path) -> list[tuple[str, int, str]]:
    """Every write that was let through, in their order: name, token, task."""
    with _opened(path) as db:
        return list(db.execute("SELECT name, token, task FROM landed ORDER BY seq"))


@contextmanager
def _opened(path: str | Path) -> Iterator[sqlite3.Connection]:
    # Without the fsyncs: processes die here, the machine does not.
    with closing(sqlite3.connect(path, timeout=TRIES, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        yield db
