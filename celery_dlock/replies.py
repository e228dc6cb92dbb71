"""What the scripts answer, as records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from .records import Duplicate, Grant, Held, Holder, Parked, Queued, Refusal, Tombstoned, Used, Waiter

__all__ = ["grant", "holder", "refusal", "waiter"]


def refusal(reply: Sequence[Any], identity: str) -> Refusal:
    """Why an acquire was refused; ``identity``: the digest of who asked."""
    verb, *facts = reply
    return _REFUSALS[verb](facts, identity)


def holder(fields: Sequence[Any]) -> Holder:
    """Who holds a lock."""
    acquisition, identity, token, since, left, count, pttl, *by = fields
    return Holder(
        *_who(*(text.decode("utf-8", "replace") for text in by)),
        since=int(since) / 1e6,
        owner=acquisition.decode().rpartition(".")[0],
        identity=identity.decode(),
        token=int(token),
        hold_count=int(count),
        left=left == b"1",
        expires_in=max(0, int(pttl)) / 1000,
    )


def _used(mark: bytes, identity: str) -> Used:
    at, of, by = mark.split(b"\n", 2)
    return Used(Holder(*_who(*json.loads(by)), since=int(at) / 1e6, identity=of.decode()), of.decode() == identity)


def _who(task: str, task_id: str, node: str, pid: str) -> tuple[str | None, str | None, str, int]:
    return task or None, task_id or None, node, int(pid)


def _held(facts: Sequence[Any], identity: str) -> Held:
    held = holder(facts[1:])
    return Held(held, bool(identity) and held.identity == identity, int(facts[0]))


def _queued(facts: Sequence[Any], _identity: str) -> Queued:
    waiting, rank, *held = facts
    return Queued(waiting, int(rank), holder(held) if held else None)


def _parked(facts: Sequence[Any], _identity: str) -> Parked:
    rank, position, *grants = facts
    return Parked(int(rank), int(position), grant(*grants[:3]), grant(*grants[3:]))


def _passed_on(facts: Sequence[Any]) -> Grant | None:
    return grant(*facts) if facts else None


_REFUSALS: dict[bytes, Callable[[Sequence[Any], str], Refusal]] = {
    b"held": _held,
    b"used": lambda facts, identity: _used(facts[0], identity)._replace(granted=_passed_on(facts[1:])),
    b"done": lambda facts, _identity: Duplicate(_passed_on(facts)),
    b"gone": lambda _facts, _identity: Tombstoned(),
    b"queue": _queued,
    b"parked": _parked,
}


def grant(identity: bytes, entry: bytes, turn: bytes = b"") -> Grant | None:
    """Whose turn it is, if it is anybody's."""
    return Grant(identity.decode(), entry.decode("utf-8", "replace"), turn.decode()) if identity else None


def waiter(rank: bytes, who: bytes) -> Waiter:
    """Who waits; nameless where its entry cannot be read: its turn will show that to be said aloud."""
    try:
        task, task_id = json.loads(who)
    except (TypeError, ValueError):
        task = task_id = ""
    return Waiter(task, task_id, float(rank) / 1e6)
