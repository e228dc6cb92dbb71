"""The resources that tests/support/apps/fencing.py writes: databases, a Redis value, an HTTP API."""

import json
import sqlite3
import threading
import urllib.request
from contextlib import closing, contextmanager
from http.server import ThreadingHTTPServer

import redis

from tests.support.apps.fencing_patterns import (
    OPEN_OR_SET,
    SET_BALANCE,
    Fenced,
    claim,
    put_fenced,
    set_fenced,
    write_fenced,
)
from tests.support.postgresql import Session
from tests.support.processes import HOST

#: A resource that is given it by every writer refuses none.
SAME = 1
SQL = ["a row", "a row that may be missing", "several rows"]
TABLES = (
    "CREATE TABLE account (id VARCHAR(60) PRIMARY KEY, balance BIGINT NOT NULL, fence BIGINT NOT NULL)",
    "CREATE TABLE posting (account VARCHAR(60) NOT NULL, amount BIGINT NOT NULL)",
    "CREATE TABLE fence (name VARCHAR(60) PRIMARY KEY, token BIGINT NOT NULL)",
)


def open_database(place):
    """A connection to SQLite (a path) or PostgreSQL (a URL)."""
    return closing(Session(place) if place.startswith("postgresql:") else sqlite3.connect(place, timeout=30))


def a_row(place, name, value, token):
    with open_database(place) as db:
        write_fenced(db, SET_BALANCE, id=name, balance=value, token=token)


def a_row_that_may_be_missing(place, name, value, token):
    with open_database(place) as db:
        write_fenced(db, OPEN_OR_SET, id=name, balance=value, token=token)


def several_rows(place, name, value, token):
    with open_database(place) as db:
        claim(db, name, token)
        db.execute("INSERT INTO posting (account, amount) VALUES (:account, :amount)", {"account": name, "amount": 1})
        values = {"id": name, "balance": value}
        db.execute("UPDATE account SET balance = :balance WHERE id = :id", values)
        db.commit()


def a_redis_value(place, name, value, token):
    with redis.Redis.from_url(place) as store:
        set_fenced(store, name, value, token)


def an_http_api(place, name, value, token):
    put_fenced(f"{place}/{name}", value, token)


WRITES = {
    "a row": a_row,
    "a row that may be missing": a_row_that_may_be_missing,
    "several rows": several_rows,
    "a Redis value": a_redis_value,
    "an HTTP API": an_http_api,
}


def create(place):
    with open_database(place) as db:
        for table in TABLES:
            db.execute(table)
        db.commit()


def open_account(place, name):
    with open_database(place) as db:
        db.execute("INSERT INTO account (id, balance, fence) VALUES (:id, 0, 0)", {"id": name})
        db.commit()


def stored(kind, place, name):
    """Return the final state of the resource: its value and its fence."""
    if kind == "a Redis value":
        with redis.Redis.from_url(place) as store:
            return tuple(int(text) for text in store.hmget(name, "value", "fence"))
    if kind == "an HTTP API":
        with urllib.request.urlopen(f"{place}/{name}", timeout=10) as answer:
            return json.loads(answer.read()), int(answer.headers["X-Fencing-Token"])
    with open_database(place) as db:
        wanted = {"id": name}
        balance, fence = db.execute("SELECT balance, fence FROM account WHERE id = :id", wanted).fetchone()
        if kind == "several rows":
            (postings,) = db.execute("SELECT count(*) FROM posting WHERE account = :id", wanted).fetchone()
            (fence,) = db.execute("SELECT token FROM fence WHERE name = :id", wanted).fetchone()
            return (balance, postings), fence
        return balance, fence


@contextmanager
def served_fenced():
    """The guide's HTTP API; gives its URL."""
    with ThreadingHTTPServer((HOST, 0), Fenced) as server:
        server.values, server.lock = {}, threading.Lock()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{HOST}:{server.server_port}"
        server.shutdown()
        thread.join(10)
