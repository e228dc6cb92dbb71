"""The scripts' replies, parsed into the values of the store contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from ...errors import StoreUnavailable
from ...keys.lock_name import ONE_SEAT, LockName
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
    Released,
    RenewalResult,
    StopRequest,
    Tombstoned,
    Unknown,
    Used,
)
from ..operator_model import ClaimView, LockView, RunView, Waiter, WaiterState, Waiting
from ..rules import views
from ..rules.data import Claim, LockRecord, RunMark
from .connection import ErrorReply
from .server_errors import overwritten

__all__ = [
    "first",
    "grant",
    "holder",
    "lock_view",
    "names_in",
    "pairs",
    "refusal",
    "released",
    "removed",
    "renewed",
    "run_mark",
    "run_view",
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
    return views.holder_of(lock, int(left_ms))


def text(value: bytes) -> str:
    """Return a field as text. Another program may have written it."""
    return value.decode("utf-8", "replace")


def _texts(values: Iterable[bytes | None]) -> Iterator[str]:
    return (text(value or b"") for value in values)


def run_mark(reply: Sequence[Any]) -> tuple[RunMark, int, str]:
    """Return a run mark, the milliseconds until it expires, and the acquisition that holds the lock."""
    return RunMark.of(text(reply[0])), int(reply[1]), text(reply[2])


def _used(facts: Sequence[Any], identity: str) -> Used:
    earlier = views.run_holder(RunMark.of(text(facts[0])))
    return Used(earlier, earlier.identity == identity, _next_grant(facts[1:]))


def _unknown(facts: Sequence[Any], _identity: str) -> Unknown:
    return Unknown(views.run_holder(RunMark.of(text(facts[0]))), _next_grant(facts[1:]))


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


def released(reply: Any) -> tuple[Released, bool, str]:
    """Return the result of a release, and what is left to do, from a sum of flags, perhaps with a grant and an error.

    The second value says whether the caller has to sweep the queue, because the script did not have its keys. The third
    is the error with which the server refused to wake a caller ("": none).
    """
    parts: Sequence[Any] = [reply] if isinstance(reply, int) else reply
    flags, *facts = parts
    granted = grant(*facts[:3]) if facts else None
    ended = Released(bool(flags & 1), bool(flags & 2), granted, bool(flags & 8))
    return ended, bool(flags & 4), text(facts[3]) if flags & 16 else ""


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
    state, task_id, task, node, since = _texts(reply)
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
        yield Waiter(name.text, text(identity), *names_in(names), since, known, position, until)


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


# -- replies to operators


def lock_view(name: LockName, tick: str, reply: Sequence[Any]) -> LockView:
    """Return the view of a lock name, or of one tick of it, from the reply of ``describe``."""
    now, waiting, has_dead_letters, lock, run, claim = reply
    last_run = run_view(name, tick, [run[1], run[0], lock[1] if lock else b""]) if run else None
    holder = claimed = None
    if tick:  # the view of one tick: the name itself has a view of its own
        waiting = 0
    else:
        holder = views.holder_view(_lock(lock), int(lock[0]), int(now)) if lock else None
        # The claim of a name with seats is that of the name.
        claimed = _claim(name, claim) if claim and name.seats != ONE_SEAT else None
    expires = holder is not None and holder.state != "granted"
    shown = (lock if expires else None, run if last_run else None, claim if claimed else None)
    endless = sum(int(fields[0]) < 0 for fields in shown if fields)
    return views.lock_view(
        name.text, int(now), holder, last_run, claimed, waiting,
        has_dead_letters=bool(has_dead_letters), without_expiry=endless,
    )  # fmt: skip


def _lock(fields: Sequence[Any]) -> LockRecord:
    (
        acquisition, token, since, releasing, task, task_id, process, ttl_ms, due, operator, reason, asked,
    ) = _texts(fields[1:])  # fmt: skip
    node, _, pid = process.rpartition(" ")
    return LockRecord(
        acquisition, "", int(token), int(since), task, task_id, node, pid or "0", _number(ttl_ms),
        releasing=releasing == "1", operator=operator or None, reason=reason, asked=_number(asked), due=_number(due),
    )  # fmt: skip


def _number(value: str) -> int | None:
    return int(value) if value else None


def _claim(name: LockName, fields: Sequence[Any]) -> ClaimView:
    task_id, task, node, since, generation = _texts(fields[1:])
    claim = Claim(task_id, task, node, int(generation or 0), "", int(since or 0))
    return views.claim_view(name.text, claim, int(fields[0]))


def run_view(name: LockName, tick: str, reply: Sequence[Any]) -> RunView | None:
    """Return a run from a run mark, the milliseconds until it expires, and the acquisition that holds the lock."""
    return views.run_view(name.text, tick, *run_mark(reply))


def names_in(names: bytes) -> tuple[str, str]:
    """Return task name and task id from the first line of a parked message; "" for a message that is unreadable."""
    return views.names_in(text(names))
