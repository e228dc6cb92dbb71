"""The scripts' replies, parsed into the records of the store contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from ...errors import StoreUnavailable
from ...keys.lock_name import LockName
from ..base import QueueStepResult
from ..claim_model import ExistingCall
from ..holder_model import Holder
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
)
from ..operator_model import Waiter, WaiterState, Waiting
from ..rules.data import LockRecord, RunMark
from ..rules.views import holder_of, names_in, run_holder
from .connection import ErrorReply
from .server_errors import overwritten

__all__ = [
    "first",
    "grant",
    "holder",
    "pairs",
    "refusal",
    "released",
    "removed",
    "renewed",
    "run_mark",
    "swept",
    "text",
    "unexecuted",
    "waiting",
    "with_more",
]


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
    acquisition, identity, token, since, releasing, count, left_ms, task, task_id, node, pid = fields
    lock = LockRecord(
        text(acquisition), text(identity), int(token), int(since), text(task), text(task_id), text(node), text(pid),
        count=int(count), releasing=releasing == b"1",
    )  # fmt: skip
    return holder_of(lock, int(left_ms))


def text(value: bytes) -> str:
    """Return a field as text. Another program may have written it."""
    return value.decode("utf-8", "replace")


def run_mark(reply: Sequence[Any]) -> tuple[RunMark, int, str]:
    """Return a run mark, the milliseconds until it expires, and the acquisition that holds the lock."""
    return RunMark.of(text(reply[0])), int(reply[1]), text(reply[2])


def _used(facts: Sequence[Any], identity: str) -> Used:
    earlier = run_holder(RunMark.of(text(facts[0])))
    return Used(earlier, earlier.identity == identity, _next_grant(facts[1:]))


def _unknown(facts: Sequence[Any], _identity: str) -> Unknown:
    return Unknown(run_holder(RunMark.of(text(facts[0]))), _next_grant(facts[1:]))


def _held(facts: Sequence[Any], identity: str) -> Held:
    held = holder(facts[1:])
    return Held(held, bool(identity) and held.identity == identity, int(facts[0]))


def _queued(facts: Sequence[Any], _identity: str) -> Queued:
    waiting, rank, *held = facts
    return Queued(waiting, int(rank), holder(held) if held else None)


def _parked(facts: Sequence[Any], _identity: str) -> Parked:
    rank, position, *grants = facts
    newer = text(grants[5]) if grants[5:] else ""
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
    return Grant(identity.decode(), text(entry), grant_id.decode()) if identity else None


class ReleaseReply(NamedTuple):
    """The reply of a release.

    Args:
        ours: The acquisition held the lock.
        duplicate_seen: A duplicate of its message was seen.
        must_sweep: The caller has to sweep the queue, because the script did not have the queue's keys.
        woke: A caller that waited in its thread or pool slot was woken.
        granted: The grant to publish.
        wake_error: The error with which the server refused to wake a caller; "" if it did not.
    """

    ours: bool
    duplicate_seen: bool
    must_sweep: bool
    woke: bool
    granted: Grant | None
    wake_error: str


def released(reply: Any) -> ReleaseReply:
    """Return the reply of a release: a sum of flags, perhaps with a grant and an error."""
    parts: Sequence[Any] = [reply] if isinstance(reply, int) else reply
    flags, *facts = parts
    error = text(facts[3]) if flags & 16 else ""
    granted = grant(*facts[:3]) if facts else None
    return ReleaseReply(bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8), granted, error)


def swept(reply: Sequence[Any]) -> QueueStepResult:
    """Return the result of a sweep."""
    identity, entry, grant_id, dead, lost_grant = reply[:5]
    dead_letter, _, why = text(dead).partition(" ")
    return QueueStepResult("", grant(identity, entry, grant_id), dead_letter, why == "foreign", bool(lost_grant))


def removed(reply: Sequence[Any]) -> QueueStepResult:
    """Return the result of the removal of a waiter: its message, and the next grant."""
    entry, *granted = reply
    return QueueStepResult(text(entry), grant(*granted))


def first(reply: Sequence[Any]) -> ExistingCall | None:
    """Return the call that already has the name, or None if the claim succeeded."""
    if not reply:
        return None
    state, task_id, task, node, since = (text(part or b"") for part in reply)
    return ExistingCall(state, task or None, task_id or None, node, int(since or 0) / 1e6)


def waiting(name: LockName, reply: Sequence[Any]) -> Waiting:
    """Return the number of waiters, and the first of them."""
    count, *facts = reply
    return Waiting(name.text, count, tuple(_waiters(name, facts)))


def _waiters(name: LockName, facts: Sequence[Any]) -> Iterator[Waiter]:
    for position, start in enumerate(range(0, len(facts), 5), 1):
        identity, rank, state, due, names = facts[start : start + 5]
        known = cast("WaiterState", text(state))
        since, until = float(rank) / 1e6, float(due) / 1e6
        yield Waiter(name.text, text(identity), *names_in(text(names)), since, known, position, until)


def pairs(reply: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Return the pairs of a reply in which keys and values alternate."""
    return zip(reply[::2], reply[1::2], strict=True)


def unexecuted(reply: Any) -> bool:
    """Return whether the server refused to execute a renewal (a replica, a full disk), so the lease may still stand."""
    return type(reply) is ErrorReply and not overwritten(reply)


def renewed(reply: Any) -> RenewalResult:
    """Return whether a lease was renewed; None if the server did not execute the renewal."""
    if type(reply) is bytes:
        return StopRequest(text(reply))
    if isinstance(reply, StoreUnavailable) or unexecuted(reply):
        return None
    # If another program overwrote the key, this lease is lost. The other leases must still be renewed.
    return type(reply) is not ErrorReply and bool(reply)
