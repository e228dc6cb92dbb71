"""Open the store at a location. A store's modules are imported only when a location needs them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InvalidLockOptions
from ..options.durability import PRIMARY, Durability
from .features import features_of
from .location import StoreLocation, safe_error_text

if TYPE_CHECKING:
    from .base import LockStore
    from .engine.store import EngineStore
    from .operator import OperatorStore
    from .redis.topology import Topology
    from .server_model import Quarantine
    from .sql.migrations import Migrator

__all__ = ["StoreDescription", "open_migrator", "open_operator_store", "open_store"]


class StoreDescription(NamedTuple):
    """A store, as one process of a worker describes it to another one.

    Args:
        locations: As for :func:`open_store`.
        prefix: As for :func:`open_store`.
        timeout: The setting ``dlock_timeout`` of the store's app.
    """

    locations: tuple[StoreLocation, ...]
    prefix: str
    timeout: float

    def text(self) -> bytes | None:
        """Return the description for :meth:`from_text`. It contains the secrets of the locations.

        Return None if an option cannot be passed to another process: a ``credential_provider`` that holds a
        connection, for example.
        """
        # Leave out what this process has learned of the servers. It is of no use elsewhere, and may contain mutexes.
        bare = self._replace(locations=tuple(replace(each, shared={}, logged=set()) for each in self.locations))
        try:
            text = pickle.dumps(tuple(bare))
            pickle.loads(text)  # noqa: S301  # it was made in the line above
        except Exception:  # noqa: BLE001  # an option may be any object, and its methods raise anything
            return None
        return text

    @classmethod
    def from_text(cls, text: bytes) -> StoreDescription:
        """Read a description. Call this only with a text that a process of this worker has written."""
        return cls(*pickle.loads(text))  # noqa: S301  # see above

    def open(self, timeout: float) -> LockStore:
        """Open the store. It grants no locks, so it needs no quarantine. Opens no connection."""
        return open_store(self.locations, timeout=timeout, prefix=self.prefix)


def open_store(
    locations: Sequence[StoreLocation],
    *,
    timeout: float,
    prefix: str,
    quarantine: Quarantine | None = None,
    durability: Durability = PRIMARY,
) -> LockStore:
    """Return the store at these locations. Opens no connection.

    Args:
        locations: The location of the store, or the locations of several independent servers (Redlock).
        timeout: Seconds after which a command counts as unanswered.
        prefix: The start of every key of this app.
        quarantine: The quarantine of a server that may have lost leases; None: no quarantine.
        durability: The servers that must confirm each write. Neither a Redlock nor ``memory://`` has any.

    Raises:
        InvalidLockOptions: No connection can be configured from the options of a location.
    """
    if (found := _engine_store(locations[0], timeout, prefix)) is not None:
        return found

    from .redis.store import RedisStore  # noqa: PLC0415  # importing celery_dlock must not load redis-py

    if len(locations) > 1:
        from .redlock.store import RedlockStore  # noqa: PLC0415  # not at import time

        names: dict[str, str] = {}
        members = [RedisStore(_topology(location, timeout, names), prefix, quarantine) for location in locations]
        return RedlockStore(members, [location.shown for location in locations], timeout=timeout)
    return RedisStore(_topology(locations[0], timeout), prefix, quarantine, durability)


def open_operator_store(locations: Sequence[StoreLocation], *, timeout: float, prefix: str) -> OperatorStore:
    """Return the store at these locations, with the commands that operators need. Opens no connection.

    Args: as for :func:`open_store`.

    Raises:
        InvalidLockOptions: No connection can be configured from the options, or the locations are those of a Redlock.
    """
    if (found := _engine_store(locations[0], timeout, prefix)) is not None:
        return found

    from .redis.operator import RedisOperatorStore  # noqa: PLC0415  # importing celery_dlock must not load redis-py

    if reason := features_of([location.kind for location in locations]).listing:
        urls = ", ".join(location.shown for location in locations)
        raise InvalidLockOptions(
            f"cannot show the locks of a Redlock as a whole: its servers ({urls}) {reason}; "
            "give one of them, in an app whose dlock_url is that server"
        )
    return RedisOperatorStore(_topology(locations[0], timeout), prefix)


def open_migrator(locations: Sequence[StoreLocation], *, timeout: float) -> Migrator:
    """Return the migrator of the tables at these locations. Opens no connection.

    Raises:
        InvalidLockOptions: The store has no tables, or its driver is missing.
    """
    location = locations[0]
    if location.kind == "postgresql":
        with _driver(location, "psycopg", "postgresql"):
            from .sql.postgresql.migrate import PostgreSQLMigrator  # noqa: PLC0415  # needs psycopg

            return PostgreSQLMigrator(location, timeout)
    if location.kind == "mysql":
        with _driver(location, "PyMySQL", "mysql"):
            from .sql.mysql.migrate import MySQLMigrator  # noqa: PLC0415  # needs PyMySQL

            return MySQLMigrator(location, timeout)
    raise InvalidLockOptions(f"{location.setting}: {location.shown!r} has no tables, so there is nothing to migrate")


@contextmanager
def _driver(location: StoreLocation, driver: str, extra: str) -> Iterator[None]:
    """Return a context that imports and configures the driver of an SQL store.

    Raises:
        InvalidLockOptions: It is missing, or does not know an option of the location.
    """
    try:
        yield
    except ImportError as error:
        reason = f"its driver {driver} cannot be imported ({error}): pip install 'celery-dlock[{extra}]'"
    except ValueError as error:
        if isinstance(error, InvalidLockOptions):
            raise
        reason = safe_error_text(error)
    else:
        return
    raise InvalidLockOptions(f"{location.setting}: cannot keep locks at {location.shown!r}; {reason}")


def _engine_store(location: StoreLocation, timeout: float, prefix: str) -> EngineStore | None:
    """Return the store whose rules run in this process; None if a server runs them."""
    if location.kind == "memory":
        from .engine.store import EngineStore  # noqa: PLC0415  # not at import time
        from .memory.backend import MemoryBackend  # noqa: PLC0415  # not at import time

        # The location belongs to the settings of one app, so two apps share no data. setdefault is atomic.
        return EngineStore(location.shared.setdefault(f"memory {prefix}", MemoryBackend()))
    if location.kind == "postgresql":
        from .engine.store import EngineStore  # noqa: PLC0415  # not at import time

        with _driver(location, "psycopg", "postgresql"):
            from .sql.postgresql.backend import PostgreSQLBackend  # noqa: PLC0415  # needs psycopg

            return EngineStore(PostgreSQLBackend(location, timeout, prefix))
    if location.kind == "mysql":
        from .engine.store import EngineStore  # noqa: PLC0415  # not at import time

        with _driver(location, "PyMySQL", "mysql"):
            from .sql.mysql.backend import MySQLBackend  # noqa: PLC0415  # needs PyMySQL

            return EngineStore(MySQLBackend(location, timeout, prefix))
    return None


def _topology(location: StoreLocation, timeout: float, names: dict[str, str] | None = None) -> Topology:
    from .redis.endpoint import ServerEndpoint  # noqa: PLC0415  # not at import time
    from .redis.pool import ConnectionPool  # noqa: PLC0415  # not at import time

    try:
        if location.kind == "cluster":
            from .redis.cluster.topology import Cluster  # noqa: PLC0415  # not at import time

            ServerEndpoint(location.options_at(location.addresses[0]))  # raises now if the options are invalid
            return Cluster(location.addresses, location.options_at, timeout=timeout, shared=location.shared)
        if location.kind == "sentinel":
            from .redis.sentinel import SentinelEndpoint  # noqa: PLC0415  # not at import time

            return ConnectionPool(SentinelEndpoint(location, timeout=timeout), timeout=timeout)
        options = location.options_at(location.addresses[0] if location.addresses else None)
        if names is None:
            return ConnectionPool(ServerEndpoint(options), timeout=timeout)

        from .redlock.endpoint import MemberEndpoint  # noqa: PLC0415  # not at import time

        return ConnectionPool(MemberEndpoint(options, location.shown, names), timeout=timeout)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, InvalidLockOptions):
            raise
        raise InvalidLockOptions(
            f"{location.setting}: cannot keep locks at {location.shown!r}; {safe_error_text(error)}"
        ) from None
