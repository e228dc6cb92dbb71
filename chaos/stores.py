"""The lock store of a run: how it is broken, and what it says of locks and parked messages, past the library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pymysql
import redis

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.redis.keys import LockKeys
from chaos.broker_log import KEEP_ALL
from chaos.schedule import KINDS
from tests.support.processes import HOST
from tests.support.servers import Server
from tests.support.sql_stores import DATABASES, LockTables, lock_tables, running_database

#: The values of `--store`.
STORES = ("redis", *DATABASES)
#: Faults that only Redis can have.
OF_REDIS = ("SCRIPT FLUSH", "FLUSHALL")
#: What reading a store that is away raises.
ERRORS = (redis.RedisError, psycopg.Error, pymysql.Error)


class _Server(Protocol):
    @property
    def answering(self) -> bool: ...
    def start(self) -> object: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class ChaosStore(ABC):
    """A lock store that faults strike.

    Args:
        server: Its server.
        port: The port of the server.
    """

    def __init__(self, server: _Server, port: int) -> None:
        self.server, self.port = server, port

    def faults(self) -> Mapping[str, Callable[[], object]]:
        """Return what carries out each fault of the store."""
        return {
            "CLIENT KILL": self.end_connections,
            "pause store, short": self.server.pause,
            "pause store, long": self.server.pause,
            "restart store": self._restart,
            "kill store": self._kill,
        }

    @abstractmethod
    def url(self, port: int) -> str:
        """Return the `dlock_url` of the store behind a proxy at this port."""

    @abstractmethod
    def end_connections(self) -> None:
        """End the connections of all clients."""

    @abstractmethod
    def parked(self) -> list[tuple[str, str]]:
        """Return the text of each parked message or dead letter, after a word that says which."""

    @abstractmethod
    def held(self) -> set[str]:
        """Return the held locks, each with its token."""

    @abstractmethod
    def token(self, name: LockName) -> int | None:
        """Return the token of the lock's holder; None if it is free."""

    def _restart(self) -> None:
        self.server.stop()
        self.server.start()

    def _kill(self) -> None:
        self.server.kill()
        self.server.start()


class RedisChaosStore(ChaosStore):
    def __init__(self, server: Server) -> None:
        assert server.port is not None, "start the server first"
        super().__init__(server, server.port)
        self._redis = server

    def faults(self) -> Mapping[str, Callable[[], object]]:
        own = {command: partial(run_command, self._redis, *command.split()) for command in OF_REDIS}
        return {**super().faults(), **own}

    def url(self, port: int) -> str:
        return f"redis://{HOST}:{port}/0"

    def end_connections(self) -> None:
        run_command(self._redis, "CLIENT", "KILL", "TYPE", "normal")

    def parked(self) -> list[tuple[str, str]]:
        return parked_in(self._redis)

    def held(self) -> set[str]:
        with self._redis.client() as client:
            found = {key: client.hget(key, "token") for key in client.scan_iter("dlock:*:lock:*")}
        # A grant has no holder, and no token.
        return {_shown(key, token) for key, token in found.items() if token not in (None, "0")}

    def token(self, name: LockName) -> int | None:
        with self._redis.client(socket_timeout=1) as client:
            found: Any = client.hget(LockKeys.of("dlock", name).lock, "token")
        return None if found is None else int(found)


class SQLChaosStore(ChaosStore):
    """A store in a database. A database is not emptied in operation, so no fault does that."""

    def __init__(self, tables: LockTables) -> None:
        super().__init__(tables.server, tables.server.port)
        self._tables = tables

    def url(self, port: int) -> str:
        return self._tables.url(port)

    def end_connections(self) -> None:
        self._tables.end_sessions()

    def parked(self) -> list[tuple[str, str]]:
        return self._tables.parked()

    def held(self) -> set[str]:
        return {_shown(lock.name, lock.token) for lock in self._tables.held()}

    def token(self, name: LockName) -> int | None:
        return next((lock.token for lock in self._tables.held(self._tables.row(name))), None)


def kinds_of(store: str) -> list[str]:
    """Return the kinds of faults of a run with the store that `--store` names."""
    return [kind for kind in KINDS if store == "redis" or kind not in OF_REDIS]


@contextmanager
def running_store(kind: str, folder: Path) -> Iterator[ChaosStore]:
    """Return a context with the store that `--store` names; its data survive a killed server."""
    if kind == "redis":
        with Server(folder, persistent=True, options=KEEP_ALL) as server:
            yield RedisChaosStore(server)
    else:
        with running_database(kind) as database, lock_tables(database) as tables:
            yield SQLChaosStore(tables)


def parked_in(server: Server) -> list[tuple[str, str]]:
    """Return the text of each message that is parked in this Redis, as `ChaosStore.parked`."""
    with server.client() as client:
        return [
            (kind, text)
            for kind in ("messages", "dead")
            for key in client.scan_iter(f"dlock:*:{kind}:*")
            for text in client.hvals(key)
        ]


def run_command(server: Server, *command: str) -> None:
    """Send a command to Redis."""
    with server.client() as client:
        try:
            client.execute_command(*command)
        except redis.ConnectionError:
            if command[0] != "CLIENT":
                raise  # only CLIENT KILL may cut its own connection off


def _shown(name: str, token: object) -> str:
    return f"{name} with token {token}"
