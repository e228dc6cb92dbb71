"""Claims, which publishers make (``unique``)."""

from __future__ import annotations

from ..claim_model import ClaimRequest, ExistingCall
from .data import Claim, QueuePart
from .records import TOMBSTONE_MS, Records
from .views import first_line

__all__ = ["claim", "extend_claim", "release_claim"]


def claim(records: Records, request: ClaimRequest) -> ExistingCall | None:
    """Claim a lock name for a message that is about to be published. Return the call that has the name, or None."""
    first, number = records.claim(), request.generation
    ours = (
        first is not None
        and first.task_id == request.task_id
        and (first.attempt == request.attempt or number > first.generation)
    )
    if first is not None and not ours:
        return _existing("queued", first.task_id, first.task, first.node, first.since)
    if records.mark("tombstone", request.attempt) is not None:
        return None
    if not ours:
        other = (
            _running_call(records, request)
            or _first_waiter(records, "waiting", request)
            or _first_waiter(records, "delayed", request)
        )
        if other is not None:
            return other
    by = request.requester
    since = first.since if first is not None and ours else records.now
    records.put_claim(Claim(request.task_id, by.task, by.node, number, request.attempt, since))
    if records.claim_left_ms() < request.life_ms:
        records.expire_claim(request.life_ms)
    return None


def _existing(state: str, task_id: str, task: str, node: str, since: int) -> ExistingCall:
    return ExistingCall(state, task or None, task_id or None, node, since / 1e6)


def _running_call(records: Records, request: ClaimRequest) -> ExistingCall | None:
    """Return the call that runs or has the lock granted."""
    lock = records.lock()
    if lock is None:
        return None
    granted = lock.kind == "grant"
    # No call runs if the lock is kept by min_hold, or if its holder's body has ended. A lock that is reserved for a
    # retry counts as running.
    ended = lock.kind in ("min_hold", "guard") or (lock.releasing and lock.kind != "keep_on_retry")
    runs = not granted and not ended and request.refuse_while_running
    # A retry follows a call with its own id. That call does not refuse the retry.
    if not (granted or runs) or (request.generation > 0 and lock.task_id == request.requester.task_id):
        return None
    return _existing("waiting" if granted else "running", lock.task_id, lock.task, lock.node, lock.since)


def _first_waiter(records: Records, part: QueuePart, request: ClaimRequest) -> ExistingCall | None:
    for identity, _ in records.first_in(part, 1):
        names = first_line(records.entry(identity) or "")
        if isinstance(names, list) and len(names) > 1 and (not request.generation or names[1] != request.task_id):
            return _existing("waiting", str(names[1]), str(names[0]), "", 0)
    return None


def release_claim(records: Records, task_id: str, generation: int, attempt: str) -> bool:
    """Release a claim, because its message has started, has ended, or was not published."""
    if attempt:
        records.put_mark("tombstone", attempt, "1", TOMBSTONE_MS)
    found = records.claim()
    if found is None or found.task_id != task_id or found.generation > generation:
        return False
    if attempt and found.attempt != attempt:
        return False
    records.drop_claim()
    return True


def extend_claim(records: Records, task_id: str, life_ms: int) -> None:
    """Extend a claim, because a worker has its message."""
    found = records.claim()
    if found is not None and found.task_id == task_id and records.claim_left_ms() < life_ms:
        records.expire_claim(life_ms)
