"""The data of a store in SQL: what does not depend on the server.

A write session locks the row of its lock name, so two transactions of one name run one after the other.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote

from ...keys.lock_name import ONE_LOCK, LockName, split_seat
from ..base import ReleaseRequest
from ..engine.backend import Backend, Listed
from ..location import StoreLocation
from ..model import Acquired, AcquireRequest, Released, Renewal
from ..operator import ListCursor
from ..rules.texts import head_from_text
from ..server_model import StoreInfo
from .session import SessionStatements

__all__ = ["Lease", "SQLBackend", "SQLStatements"]

#: Leases that one statement renews.
RENEWED_AT_ONCE: Final = 1000
#: Seconds between two removals of what has expired.
REMOVAL_SECONDS: Final = 1.0


class SQLStatements(SessionStatements, Protocol):
    """The statements of a database. Their values have names."""

    names: str
    queues: str
    runs: str
    dead_letters: str
    due: str
    count: str
    clock: str
    durability_cure: str


class Lease(NamedTuple):
    """A plain lease to renew.

    Args:
        key: The name of its row.
        owner: The acquisition that holds the lock.
        ttl_ms: Milliseconds that it is held from now on.
        number: Its number in the call.
    """

    key: str
    owner: str
    ttl_ms: int
    number: int


class SQLBackend(Backend, ABC):
    """The data of one app.

    Args:
        location: The location of the server.
        timeout: Seconds that each statement may take.
        prefix: The start of every name of this app.
        sql: The statements.
    """

    def __init__(self, location: StoreLocation, timeout: float, prefix: str, sql: SQLStatements) -> None:
        self.shown, self.timeout, self._texts = location.shown, timeout, sql
        #: Every name begins with the first text, and is less than the second. No other prefix has names between.
        self._start = f"{quote(prefix, safe='')}:"
        self._end = f"{self._start[:-1]};"
        self._removed_to, self._next_removal = self._start, 0.0

    @abstractmethod
    def _ask(self, statement: str, values: Any = ()) -> list[tuple[Any, ...]]:
        """Return the rows of one statement."""

    @abstractmethod
    def _remove(self, after: str) -> str | None:
        """Remove expired marks, and the names of the next range that nothing has used for ten minutes.

        Return the last name of the range; None if there is no range behind ``after``.
        """

    @abstractmethod
    def _acquire(self, values: dict[str, Any]) -> tuple[int, int] | None:
        """Take a free lock. Return its token and the time; None if it is not free, or not plain."""

    @abstractmethod
    def _release(self, key: str, acquisition: str) -> Released | None:
        """End a plain lock. Return None if it is not held, or not plain."""

    @abstractmethod
    def _renew(self, leases: list[Lease], within: float | None) -> list[int]:
        """Renew plain leases. Return the numbers of those that were renewed."""

    def key(self, name: LockName) -> str:
        """Return the name of a row. Rows are in the order of :class:`~celery_dlock.store.operator.ListCursor`."""
        return f"{self._start}{name.bucket:03x}:{split_seat(name)[0]}"

    def _parts(self, key: str) -> tuple[int, str]:
        """Return the bucket and the text of a row's name."""
        bucket, _, text = key[len(self._start) :].partition(":")
        return int(bucket, 16), text

    def cursors(self, listed: Listed, after: ListCursor | None, most: int) -> list[ListCursor]:
        sql = self._texts
        statements = {"name": sql.names, "run": sql.runs, "dead": sql.dead_letters, "queue": sql.queues}
        name, detail = (
            (self._start, "") if after is None else (self.key(LockName(after.name, after.bucket)), after.detail)
        )
        values = {"name": name, "detail": detail, "end": self._end, "most": most}
        return [ListCursor(*self._parts(key), one) for key, one in self._ask(statements[listed], values)]

    def due(self, buckets: Sequence[int], most: int, within_us: int) -> list[LockName]:
        if time.monotonic() >= self._next_removal:
            self._next_removal = time.monotonic() + REMOVAL_SECONDS
            self._removed_to = self._remove(self._removed_to) or self._start
        if not buckets:
            return []
        values = {
            "bucket_at": len(self._start) + 1, "buckets": [f"{bucket:03x}" for bucket in buckets],
            "within_us": within_us, "start": self._start, "end": self._end, "most": most,
        }  # fmt: skip
        found = []
        for key, rest, now in self._ask(self._texts.due, values):
            bucket, text = self._parts(key)
            sweeps = head_from_text(rest).sweeps.items()
            found += [(when, LockName(text, bucket, seats)) for seats, when in sweeps if when <= now + within_us]
        return [name for _, name in sorted(found)]

    def count(self) -> int:
        return int(self._ask(self._texts.count, (self._start, self._end))[0][0])

    def now(self) -> float:
        return float(self._ask(self._texts.clock)[0][0]) / 1e6

    def info(self) -> StoreInfo:
        return StoreInfo(durability_cure=self._ask(self._texts.durability_cure)[0][0], eviction="noeviction")

    def _plain(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> dict[str, Any] | None:
        """Return the values of a plain acquire; None if the request is not plain."""
        plain = AcquireRequest(
            request.requester, request.identity, age_us=request.age_us, rank_us=request.rank_us, notify=request.notify,
            run_mark_ms=request.run_mark_ms, hold_if_unknown=request.hold_if_unknown, tick=request.tick,
            doubt_us=request.doubt_us,
        )  # fmt: skip
        if name.seats != ONE_LOCK or request != plain:
            return None
        identity = request.identity.digest if request.identity else ""
        holder = json.dumps([identity, *request.requester])
        return {
            "name": self.key(name), "owner": acquisition, "identity": identity, "ttl_ms": ttl_ms, "holder": holder
        }  # fmt: skip

    def acquire_plain(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | None:
        values = self._plain(name, acquisition, ttl_ms, request)
        found = None if values is None else self._acquire(values)
        if found is None:
            return None
        token, since = found
        return Acquired(token, since / 1e6, since - request.age_us if request.rank_us is None else request.rank_us)

    def release_plain(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released | None:
        plain = ReleaseRequest(
            final=ending.final, identity=ending.identity, requester=ending.requester, tick=ending.tick,
            seed=ending.seed, window_ms=ending.window_ms,
        )  # fmt: skip
        return self._release(self.key(name), acquisition) if name.seats == ONE_LOCK and ending == plain else None

    def renew_plain(self, renewals: Sequence[Renewal], within: float | None) -> Sequence[bool | None]:
        answers: list[bool | None] = [None] * len(renewals)
        # In the order of names: so two such statements do not wait for each other.
        leases = sorted(
            Lease(self.key(one.name), one.acquisition, one.ttl_ms, number)
            for number, one in enumerate(renewals)
            if one.name.seats == ONE_LOCK and not one.fields and not one.stoppable
        )
        for first in range(0, len(leases), RENEWED_AT_ONCE):
            for number in self._renew(leases[first : first + RENEWED_AT_ONCE], within):
                answers[number] = True
        return answers
