"""The data of a memory store under the names and in the words of the wire format, for tests that compare both."""

from collections.abc import Iterator
from typing import Any

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.memory.data import NameData
from celery_dlock.store.memory.records import Memory
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.rules.data import Claim, LockRecord, NewestCall, ReplacedCalls

__all__ = ["claim_fields", "lock_fields", "name_values"]

#: A value as Redis has it, and when it expires in us; None: never.
Value = tuple[Any, int | None]


def lock_fields(lock: LockRecord) -> dict[str, str]:
    """Return the fields of the lock's hash."""
    granted = lock.due is not None
    owned = not granted and not lock.acquisition.startswith("operator:")
    fields: dict[str, str | None] = {
        "acq": lock.acquisition,
        "identity": lock.identity,
        "token": str(lock.token),
        "since": None if lock.since == lock.token and owned else str(lock.since),
        "task": lock.task,
        "id": lock.task_id,
        "process": "" if granted else f"{lock.node} {lock.pid}",
        "ttl": None if lock.ttl_ms is None else str(lock.ttl_ms),
        "count": str(lock.count) if lock.count != 1 else None,
        "min_hold": None if lock.min_hold_ms is None else str(lock.min_hold_ms),
        "reserved_for": lock.reserved_for or None,
        "operator": lock.operator,
        "reason": lock.reason if lock.operator is not None else None,
        "asked": None if lock.asked is None else str(lock.asked),
        "stop": lock.stop,
        "rank": str(lock.rank) if granted else None,
        "due": str(lock.due) if granted else None,
        "granter": lock.granter,
        "dead_letter": lock.dead_letter or None,
        "foreign": None if lock.foreign is None else str(lock.foreign),
    }
    flags = "releasing", "dup", "notify", "has_waiters", "replaceable", "published"
    fields |= {name: "1" for name in flags if getattr(lock, name)}
    return {name: text for name, text in fields.items() if text is not None}


def claim_fields(claim: Claim) -> dict[str, str]:
    """Return the fields of the claim's hash."""
    return {
        "id": claim.task_id, "task": claim.task, "node": claim.node, "since": str(claim.since),
        "generation": str(claim.generation), "attempt": claim.attempt,
    }  # fmt: skip


def newest_fields(newest: NewestCall) -> dict[str, str]:
    """Return the fields of the hash of ``debounce``."""
    fields = {"started": newest.started}
    if newest.identity is not None:
        fields |= {"rank": newest.rank, "due_at_last": newest.due_at_last}
    texts = {name: str(number) for name, number in fields.items() if number is not None}
    return texts if newest.identity is None else texts | {"identity": newest.identity, "task_id": newest.task_id}


def replaced_fields(calls: ReplacedCalls) -> dict[str, str]:
    """Return the fields of the hash of ``on_conflict="replace"``."""
    fields = {f"stop:{identity}": by for identity, by in calls.stops.items()}
    if calls.newest is not None:
        fields |= {"newest": calls.newest, "newest_rank": str(calls.newest_rank), "newest_id": calls.newest_id}
    if calls.started_rank is not None:
        fields |= {"started_rank": str(calls.started_rank), "started_id": calls.started_id}
    return fields if calls.busy_since is None else fields | {"busy_since": str(calls.busy_since)}


def name_values(keys: LockKeys, data: NameData) -> Iterator[tuple[str, Value]]:
    """Yield the keys of one lock name, with their values."""
    waiting, messages, delayed, _ = keys.queue()
    for seat, held in data.locks.items():
        yield f"{keys.lock}:{seat}" if seat else keys.lock, (lock_fields(held.lock), held.until)
    if data.seats is not None:
        record = data.seats
        yield keys.seats_record(), (f"{record.limit} {record.seen_s} {record.places}", data.seats_until)
    if data.claim is not None:
        yield keys.claim(), (claim_fields(data.claim), data.claim_until)
    parked = dict(data.entries)
    for waiter, (rank, tries) in data.lost.items():
        parked |= {f"{waiter}:rank": str(rank)} | ({f"{waiter}:tries": str(tries)} if tries else {})
    parked |= {f"{waiter}:evicted": evicted for waiter, evicted in data.evicted_by.items()}
    parked |= {f"{waiter}:replaced_by": by for waiter, by in data.replaced_by.items()}
    if data.newest_call is not None:
        yield keys.debounced(), (newest_fields(data.newest_call), data.newest_until)
    if data.replaced is not None:
        yield keys.replaced(), (replaced_fields(data.replaced), data.replaced_until)
    yield waiting, (data.places["waiting"], None)
    yield delayed, (data.places["delayed"], None)
    yield messages, (parked, None)
    yield keys.dead(), (data.dead, None)
    for tick, (text, until) in data.runs.items():
        yield keys.run(tick), (text, until)


def all_values(memory: Memory, prefix: str) -> dict[str, Value]:
    """Return every key that exists now, with its value and its expiry."""
    now, found = memory.clock.now_us(), dict[str, Value]()
    for number, bucket in memory.buckets.items():
        keys = LockKeys.of(prefix, LockName("", number))
        if bucket.last_token:
            found[keys.last] = str(bucket.last_token), None
        for (kind, text), (value, until) in bucket.marks.items():
            found[keys.done(text) if kind == "done" else keys.tombstone(text)] = value, until
        shown = {f"{identity} {name}": since for (identity, name), since in bucket.shown_dead.items()}
        found[keys.dead_letters()] = shown, None
        found[keys.queue()[3]] = bucket.sweeps, None
        for name, data in bucket.names.items():
            found |= name_values(LockKeys.of(prefix, LockName(name, number)), data)
    return {key: (value, until) for key, (value, until) in found.items() if value and (until is None or until > now)}
