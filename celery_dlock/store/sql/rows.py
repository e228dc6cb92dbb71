"""The row of a lock name. A plain lock has columns of its own, and every other head is a text."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from ..acquisition import kind_of
from ..rules.data import Head, LockRecord, Timed
from ..rules.texts import head_from_text, head_text, record_fields

__all__ = ["HIGHEST", "LOWEST", "WAKE_US", "Row"]

LOWEST: Final = -(1 << 63)
HIGHEST: Final = (1 << 63) - 1
#: Microseconds for which a wake-up is kept for a call that begins to wait after the release.
WAKE_US: Final = 2_000_000
#: The fields of a plain lock that the column ``holder`` has.
_HOLDER: Final = ("identity", "task", "task_id", "node", "pid")
_PLAIN: Final = {"acquisition", "token", "since", "ttl_ms", *_HOLDER}


class Row(NamedTuple):
    """The row of a lock name."""

    owner: str | None = None
    until_us: int = 0
    since_us: int = 0
    token: int = 0
    ttl_ms: int | None = None
    holder: str | None = None
    rest: str | None = None
    wake_us: int = 0
    line: list[str] | None = None

    @property
    def head(self) -> Head:
        if self.owner is None:
            return head_from_text(self.rest or "")
        holder = dict(zip(_HOLDER, json.loads(self.holder or "[]"), strict=True))
        lock = LockRecord(
            self.owner,
            token=self.token,
            since=self.since_us,
            ttl_ms=self.ttl_ms,
            notify=self.line is not None,
            **holder,
        )
        return Head(locks={0: Timed(lock, self.until_us)})

    def with_head(self, head: Head, token: int, now: int, *, lines: bool = False) -> Row:
        """Return the row for a head that has changed.

        Args:
            head: The head.
            token: The highest token that was issued for the name.
            lines: A plain lock whose release wakes a call has a line.
            now: The time. The row of an empty head stays for a while, because most names are used again.
        """
        text = head_text(head)
        if not text:
            return Row(since_us=now, token=token)
        lock = head.locks.get(0)
        if lock is not None and lock.until is not None and head == Head(locks={0: lock}):
            record = lock.record
            if (
                record.token == token
                and kind_of(record.acquisition) == "owner"
                and record_fields(record).keys() <= (_PLAIN | {"notify"} if lines else _PLAIN)
            ):
                holder = json.dumps([getattr(record, name) for name in _HOLDER])
                line: list[str] | None = [] if record.notify else None
                return Row(record.acquisition, lock.until, record.since, token, record.ttl_ms, holder, line=line)
        return Row(until_us=_last(head), since_us=now, token=token, rest=text)


def _last(head: Head) -> int:
    """Return the time from which nothing of a head exists; a time that never comes if something does not expire."""
    if head.sweeps or head.parked or head.waiting or head.delayed or head.dead:
        return HIGHEST
    timed = *head.locks.values(), head.seats, head.claim, head.newest_call, head.replaced
    untils = [one.until for one in timed if one is not None]
    return max((HIGHEST if until is None else until for until in untils), default=0)
