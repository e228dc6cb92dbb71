"""The data of a memory store under the names and in the words of the wire format, for tests that compare both."""

from collections.abc import Iterator
from typing import Any

from celery_dlock.keys.lock_name import LockName, index_member
from celery_dlock.store.memory.backend import MemoryBackend, NameData
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.rules.data import Claim, LockRecord, NewestCall, ReplacedCalls, Waiter

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


def waiter_fields(identity: str, waiter: Waiter) -> dict[str, str]:
    """Return the fields of the hash of parked messages that are about one waiter."""
    rank = None if waiter.lost_rank is None else str(waiter.lost_rank)
    fields = {
        "": waiter.entry,
        ":rank": rank,
        ":tries": str(waiter.lost) if waiter.lost else None,
        ":evicted": waiter.evicted or None,
        ":replaced_by": waiter.replaced_by,
    }
    return {identity + end: text for end, text in fields.items() if text is not None}


def name_values(keys: LockKeys, data: NameData) -> Iterator[tuple[str, Value]]:
    """Yield the keys of one lock name, with their values."""
    (waiting, messages, delayed, _), head = keys.queue(), data.head
    for seat, lock in head.locks.items():
        yield f"{keys.lock}:{seat}" if seat else keys.lock, (lock_fields(lock.record), lock.until)
    if head.seats is not None:
        record = head.seats.record
        yield keys.named("seats"), (f"{record.limit} {record.seen_s} {record.seat_count}", head.seats.until)
    if head.claim is not None:
        yield keys.named("claim"), (claim_fields(head.claim.record), head.claim.until)
    if head.newest_call is not None:
        yield keys.named("debounced"), (newest_fields(head.newest_call.record), head.newest_call.until)
    if head.replaced is not None:
        yield keys.named("replaced"), (replaced_fields(head.replaced.record), head.replaced.until)
    waiters = data.waiters.items()
    yield waiting, ({one: waiter.waiting for one, waiter in waiters if waiter.waiting is not None}, None)
    yield delayed, ({one: waiter.delayed for one, waiter in waiters if waiter.delayed is not None}, None)
    parked: dict[str, str] = {}
    for identity, waiter in waiters:
        parked |= waiter_fields(identity, waiter)
    yield messages, (parked, None)
    yield keys.named("dead"), ({one: waiter.dead for one, waiter in waiters if waiter.dead is not None}, None)
    for (kind, text), mark in data.marks.items():
        made = {"done": keys.done, "tombstone": keys.tombstone, "run": keys.run}[kind]
        yield made(text), (mark.text, mark.until)


def all_values(memory: MemoryBackend, prefix: str) -> dict[str, Value]:
    """Return every key that exists now, with its value and its expiry."""
    now, found = memory.clock.now_us(), dict[str, Value]()
    shown, sweeps = dict[str, dict[str, int]](), dict[str, dict[str, int]]()
    for (bucket, name), data in memory.names.items():
        keys = LockKeys.of(prefix, LockName(name, bucket))
        if memory.last_token:
            found[keys.last] = str(memory.last_token), None
        found |= name_values(keys, data)
        letters = ((one, seats, since) for one, waiter in data.waiters.items() for seats, since in waiter.shown)
        for identity, seats, since in letters:
            shown.setdefault(keys.named("dead_letters"), {})[f"{identity} {index_member(name, seats)}"] = since
        for seats, when in data.head.sweeps.items():
            sweeps.setdefault(keys.queue()[3], {})[index_member(name, seats)] = when
    found |= {key: (value, None) for key, value in (shown | sweeps).items()}
    return {key: (value, until) for key, (value, until) in found.items() if value and (until is None or until > now)}
