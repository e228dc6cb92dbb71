"""Records that workers and operators share: crash records, duties and the audit log. They are marks of other names."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from ...keys.lock_name import BUCKETS, LockName
from .records import Records

__all__ = ["audit", "save_audit", "save_record", "shared_name", "take_duty"]

#: Maximum number of audit records.
_AUDIT_RECORDS: Final = 1000
_AUDIT_MS: Final = 100 * 365 * 24 * 3600 * 1000
_DUTY: Final = "duty"


def shared_name(*parts: str) -> LockName:
    """Return the name of shared records. It begins with ``~``, which no lock name contains."""
    digest = blake2b("\n".join(parts).encode("utf-8", "surrogatepass"), digest_size=16)
    return LockName(f"~{parts[0]}:{digest.hexdigest()}", int.from_bytes(digest.digest()[:2], "big") % BUCKETS)


def save_record(records: Records, key: str, text: str, life_ms: int) -> None:
    """Store a record for at least so many milliseconds; an empty text deletes it."""
    if text:
        records.put_mark("worker", key, text, max(life_ms, records.mark_left_ms("worker", key)))
    else:
        records.drop_mark("worker", key)


def take_duty(records: Records, worker: str, life_ms: int) -> int:
    """Take or extend the lease on a duty. Return 0, or the milliseconds until the lease of another worker ends."""
    holder = records.mark("worker", _DUTY)
    if holder is not None and holder != worker:
        return max(1, min(life_ms, records.mark_left_ms("worker", _DUTY)))
    records.put_mark("worker", _DUTY, worker, life_ms)
    return 0


def save_audit(records: Records, at_us: int, record: str) -> None:
    """Store the record of an action. Drop the oldest ones."""
    digest = blake2b(record.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    key = f"{at_us:017} {digest}"
    records.put_mark("worker", key, record, _AUDIT_MS)
    for oldest in sorted({key, *records.marks("worker")})[:-_AUDIT_RECORDS]:
        records.drop_mark("worker", oldest)


def audit(records: Records, limit: int) -> list[str]:
    """Return the newest records, the oldest of them first."""
    return [record for _, record in sorted(records.marks("worker").items())][-limit:]
