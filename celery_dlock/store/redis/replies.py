"""The scripts' replies, parsed into the records of the store contract."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ...errors import StoreUnavailable
from ...keys.lock_name import idempotency_key
from ..holder_model import Holder, LastRun
from ..model import (
    Acquired,
    Duplicate,
    Grant,
    Held,
    Parked,
    Queued,
    Refusal,
    RenewalResult,
    StopRequest,
    Tombstoned,
    Unknown,
    Used,
    owner_of,
)
from ..operator_model import OPERATOR
from ..queue_model import ExistingCall, Waiter
from .connection import ErrorReply
from .server_errors import overwritten

__all__ = ["first", "grant", "holder", "pairs", "refusal", "renewed", "unexecuted", "use", "waiter", "with_more"]


def with_more(acquired: Acquired, facts: Sequence[bytes]) -> Acquired:
    """Return the acquisition with the rest of its reply: a seat (``limit``), or seed and crash flag (``once_per``)."""
    if len(facts) == 1:
        return acquired._replace(seat=int(facts[0]))
    return acquired._replace(seed=facts[0].decode(), after_crash=facts[1] == b"1")


def refusal(reply: Sequence[Any], identity: str) -> Refusal:
    """Return why an acquire was refused; ``identity`` is the digest of the caller's message."""
    verb, *facts = reply
    return _REFUSALS[verb](facts, identity)


def holder(fields: Sequence[Any]) -> Holder:
    """Return the holder of a lock."""
    acquisition, identity, token, since, left, count, pttl, *by = fields
    return Holder(
        *_requester(*(text.decode("utf-8", "replace") for text in by)),
        since=int(since) / 1e6,
        owner=_owner(acquisition.decode()),
        identity=identity.decode(),
        token=int(token),
        hold_count=int(count),
        releasing=left == b"1",
        expires_in=max(0, int(pttl)) / 1000,
        kept_by_min_hold=acquisition == b"kept",
        reserved_for_retry=acquisition.startswith(b"reserved:"),
    )


def _owner(acquisition: str) -> str:
    return acquisition if acquisition.startswith(OPERATOR) else owner_of(acquisition)


class _Mark(NamedTuple):
    """A run mark: one field per line. ``scripts/lib/run_mark.lua`` describes the fields."""

    state: str
    at: str
    identity: str
    acquisition: str
    seed: str
    by: str
    crashed_at: str
    crashed_of: str
    crashed_by: str

    @classmethod
    def of(cls, mark: bytes) -> _Mark:
        return cls(*mark.decode("utf-8", "replace").split("\n"))

    @property
    def holder(self) -> Holder:
        return Holder(*_requester(*json.loads(self.by)), since=int(self.at) / 1e6, identity=self.identity)


def _used(facts: Sequence[Any], identity: str) -> Used:
    holder = _Mark.of(facts[0]).holder
    return Used(holder, holder.identity == identity, _next_grant(facts[1:]))


def _unknown(facts: Sequence[Any], _identity: str) -> Unknown:
    return Unknown(_Mark.of(facts[0]).holder, _next_grant(facts[1:]))


def use(reply: Sequence[Any], name: str) -> LastRun | None:
    """Return a name's last run; None if there is none, or if it ended without a success."""
    if not reply:
        return None
    mark, pttl, holding = _Mark.of(reply[0]), max(0, int(reply[1])) / 1000, reply[2].decode()
    state: Literal["used", "unknown", "running"] = "used" if mark.state == "used" else "unknown"
    if mark.state == "started" and mark.acquisition == holding:
        state = "running"
    by = mark.holder
    # Under Redlock, the stored seed is "token/seed", with the token on which the majority agreed.
    seed = mark.seed.rpartition("/")[2]
    return LastRun(state, by.task, by.task_id, by.node, by.since, pttl, idempotency_key(name, seed))


def _requester(task: str, task_id: str, node: str, pid: str) -> tuple[str | None, str | None, str, int]:
    return task or None, task_id or None, node, int(pid)


def _held(facts: Sequence[Any], identity: str) -> Held:
    held = holder(facts[1:])
    return Held(held, bool(identity) and held.identity == identity, int(facts[0]))


def _queued(facts: Sequence[Any], _identity: str) -> Queued:
    waiting, rank, *held = facts
    return Queued(waiting, int(rank), holder(held) if held else None)


def _parked(facts: Sequence[Any], _identity: str) -> Parked:
    rank, position, *grants = facts
    newer = grants[5].decode("utf-8", "replace") if grants[5:] else ""
    return Parked(int(rank), int(position), grant(*grants[:3]), grant(*grants[3:5]), newer)


def _next_grant(facts: Sequence[Any]) -> Grant | None:
    return grant(*facts) if facts else None


_REFUSALS: dict[bytes, Callable[[Sequence[Any], str], Refusal]] = {
    b"held": _held,
    b"used": _used,
    b"unknown": _unknown,
    b"done": lambda facts, _identity: Duplicate(_next_grant(facts)),
    b"tombstoned": lambda _facts, _identity: Tombstoned(),
    b"queue": _queued,
    b"parked": _parked,
}


def grant(identity: bytes, entry: bytes, grant_id: bytes = b"") -> Grant | None:
    """Return the grant that a script made, or None if it made none."""
    return Grant(identity.decode(), entry.decode("utf-8", "replace"), grant_id.decode()) if identity else None


def first(reply: Sequence[Any]) -> ExistingCall | None:
    """Return the call that already has the name, or None if the claim succeeded."""
    if not reply:
        return None
    state, task_id, task, node, since = ((part or b"").decode("utf-8", "replace") for part in reply)
    return ExistingCall(state, task or None, task_id or None, node, int(since or 0) / 1e6)


def waiter(rank: bytes, names: bytes) -> Waiter:
    """Return a waiter. Its task name and id are empty if its message is unreadable."""
    try:
        task, task_id = json.loads(names)
    except (TypeError, ValueError):
        task = task_id = ""
    return Waiter(task, task_id, float(rank) / 1e6)


def pairs(reply: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Return the pairs of a reply in which keys and values alternate."""
    return zip(reply[::2], reply[1::2], strict=True)


def unexecuted(reply: Any) -> bool:
    """Return whether the server refused to execute a renewal (a replica, a full disk), so the lease may still stand."""
    return type(reply) is ErrorReply and not overwritten(reply)


def renewed(reply: Any) -> RenewalResult:
    """Return whether a lease was renewed; None if the server did not execute the renewal."""
    if type(reply) is bytes:
        return StopRequest(reply.decode("utf-8", "replace"))
    if isinstance(reply, StoreUnavailable) or unexecuted(reply):
        return None
    # If another program overwrote the key, this lease is lost. The other leases must still be renewed.
    return type(reply) is not ErrorReply and bool(reply)
