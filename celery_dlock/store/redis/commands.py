"""Commands of the Redis store. Each is a script variant, with keys and arguments in the order of its header.

:func:`command` takes their values by the names in the header. :func:`acquire`, :func:`renew` and :func:`release` know
the order of the commands that most runs of a task send, because that is faster.
The first key determines the server that runs the command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from ...keys.lock_name import ONE_LOCK, ONE_SEAT
from ..base import ReleaseRequest
from ..model import AcquireRequest, QueueRequest, Renewal
from .keys import LockKeys
from .scripts import SCRIPTS, ScriptVariant
from .scripts.seated import SEAT_SCRIPTS

__all__ = ["DONE_MS", "TOMBSTONE_MS", "Command", "acquire", "command", "release", "renew", "renew_seat"]

#: A script variant, and the texts to send: keys, then arguments.
Command: TypeAlias = tuple[ScriptVariant, tuple[str, ...]]

#: Life of a done mark in milliseconds: longer than the time in which a broker redelivers a message (Redis: 1 h by
#: default).
DONE_MS: Final = 24 * 3600 * 1000
#: Life of a tombstone in milliseconds: longer than a command can wait in a socket or in a stopped server's queue.
TOMBSTONE_MS: Final = 10 * 60 * 1000

#: The variants of most calls: for a message, and for a ``Lock`` outside of any message.
_ACQUIRE_FOR_MESSAGE, _ACQUIRE_FOR_LOCK = SCRIPTS["acquire"].variant("message"), SCRIPTS["acquire"].variant()
_RELEASE_FOR_MESSAGE, _RELEASE_FOR_LOCK = SCRIPTS["release"].variant("message"), SCRIPTS["release"].variant()
_RENEW: Final = SCRIPTS["renew"].variant()
_RENEW_STOPPABLE: Final = SCRIPTS["renew"].variant("stoppable")


def command(
    script: str, keys: LockKeys | None, *groups: str, seats: int = ONE_LOCK, **given: str | int | Iterable[str]
) -> Command:
    """Return the command of a script.

    Args:
        script: The name of the script.
        keys: The keys of the lock name; None if the script has only keys that ``given`` has.
        groups: The groups of the header that the command has.
        seats: ``LockName.seats``. If the name has seats, the command is for the seat that it concerns.
        given: Arguments, and keys that need more than the lock name, by their names in the header. Values that the
            command does not have are left out.
    """
    scripts = SCRIPTS if seats in (ONE_LOCK, ONE_SEAT) or script not in SEAT_SCRIPTS else SEAT_SCRIPTS
    variant = scripts[script].variant(*groups)
    known = dict(given)
    if keys is not None:
        known |= {"lock": keys.lock, "last_token": keys.last, "lock_name": keys.name, "seat_limit": seats}
    values = [known[name] if keys is None or name in known else keys.named(name) for name in variant.keys]
    values += [known[name] for name in variant.args]
    return variant, tuple(text for value in values for text in _texts(value))


def _texts(value: str | int | Iterable[str]) -> Iterable[str]:
    if isinstance(value, str):
        return (value,)
    return (f"{value:d}",) if isinstance(value, int) else value


def acquire(
    keys: LockKeys,
    seats: int,
    acquisition: str,
    ttl_ms: int,
    request: AcquireRequest,
    quarantine: tuple[str, ...] = (),
) -> Command:
    """Return the command that takes a lock. A request that may wait in the queue runs the script acquire_queued.

    Args:
        keys: Keys of the lock.
        seats: ``LockName.seats``.
        acquisition: Owner and number.
        ttl_ms: Milliseconds that the lock is held without a renewal.
        request: The caller, its message, and the task's options.
        quarantine: Milliseconds of a quarantine, and failover epoch; empty if the store has no quarantine.
    """
    task, task_id, node, pid = request.requester
    notify = ("2" if request.waited else "1") if request.notify else "0"
    again = request.redelivered or request.republished or request.rank_us is not None
    if not (again or request.queue or request.once or request.min_hold_ms or quarantine or seats != ONE_LOCK):
        caller = notify, task, task_id, f"{node} {pid}"
        names = keys.lock, keys.last, keys.tombstone(acquisition)
        if request.identity is None:
            return _ACQUIRE_FOR_LOCK, (*names, acquisition, f"{ttl_ms}", "", f"{request.age_us}", *caller)
        identity = request.identity.digest
        texts = *names, keys.done(identity), acquisition, f"{ttl_ms}", identity, f"{request.age_us}", *caller
        return _ACQUIRE_FOR_MESSAGE, texts
    identity = "" if request.identity is None else request.identity.digest
    queue = request.queue or QueueRequest()
    debounce_ms, debounce_max_ms = queue.debounce or (0, 0)
    replace_max_ms, is_retry = queue.replace or (0, 0)
    quarantine_ms, failover_epoch = quarantine or ("", "")
    return _with_groups(
        "acquire_queued" if request.queue else "acquire", keys, seats,
        {
            "message": identity != "", "once": request.once and identity != "", "again": again,
            "hold": request.min_hold_ms > 0, "debounce": queue.debounce is not None,
            "replace": queue.replace is not None, "quarantine": quarantine != (),
        },
        tombstone=keys.tombstone(acquisition), done=keys.done(identity), run=keys.run(request.tick),
        acquisition=acquisition, ttl_ms=ttl_ms, identity=identity, age_us=request.age_us, notify=notify, task=task,
        task_id=task_id, process=f"{node} {pid}", redelivered=request.redelivered,
        may_be_copied=request.republished or request.redelivered,
        rank_us="" if request.rank_us is None else request.rank_us, doubt_us=request.doubt_us,
        message=queue.entry, queue_limit=queue.limit, evict_oldest=queue.evict_oldest, after_us=queue.after_us,
        sent_us=queue.sent_us, grant_id=queue.grant_id, park_duplicate=queue.park_duplicate,
        min_hold_ms=request.min_hold_ms, requester_json=request.requester.text, run_mark_ms=request.run_mark_ms,
        hold_if_unknown=request.hold_if_unknown, debounce_ms=debounce_ms, debounce_max_ms=debounce_max_ms,
        replace_max_ms=replace_max_ms, is_retry=is_retry, quarantine_ms=quarantine_ms,
        failover_epoch=failover_epoch,
    )  # fmt: skip


def _with_groups(script: str, keys: LockKeys, seats: int, present: Mapping[str, bool], **given: str | int) -> Command:
    """Return the command of a script with those of its groups that are present."""
    groups = [group for group in SCRIPTS[script].groups if present[group]]
    return command(script, keys, *groups, seats=seats, **given)


def renew(lock: str, renewal: Renewal) -> Command:
    """Return the command that renews a lease on a lock, or on one seat of a name."""
    texts = lock, renewal.acquisition, str(renewal.ttl_ms)
    variant = _RENEW_STOPPABLE if renewal.stoppable else _RENEW
    return variant, (*texts, *(text for field in renewal.fields for text in field)) if renewal.fields else texts


def renew_seat(keys: LockKeys, renewal: Renewal) -> Command:
    """Return the command that renews a lease on the seat that its acquisition holds."""
    groups = ("stoppable",) if renewal.stoppable else ()
    facts = [text for field in renewal.fields for text in field]
    return command(
        "renew", keys, *groups, seats=renewal.name.seats, acquisition=renewal.acquisition, ttl_ms=renewal.ttl_ms,
        facts=facts,
    )  # fmt: skip


def release(keys: LockKeys, seats: int, acquisition: str, request: ReleaseRequest) -> Command:
    """Return the command that ends an acquisition. Under the policy ``"queue"``, it runs release_queued."""
    identity = request.identity
    done_ms = DONE_MS if request.final else 0
    once = request.once or request.used_ms > 0
    if not (once or request.queue or request.outcome_unknown or request.reserved_for or seats != ONE_LOCK):
        if identity:
            return _RELEASE_FOR_MESSAGE, (keys.lock, keys.wake, keys.done(identity), acquisition, f"{done_ms}")
        return _RELEASE_FOR_LOCK, (keys.lock, keys.wake, acquisition)
    return _with_groups(
        "release_queued" if request.queue else "release", keys, seats,
        {
            "message": identity != "", "once": once and identity != "", "unconfirmed": request.outcome_unknown,
            "reserve": request.reserved_for != "", "replace": request.replace != "" and identity != "",
        },
        tombstone=keys.tombstone(acquisition), done=keys.done(identity), run=keys.run(request.tick),
        acquisition=acquisition, tombstone_ms=TOMBSTONE_MS, rolled_back=request.rolled_back, done_ms=done_ms,
        identity=identity, used_ms=request.used_ms, requester_json=request.requester, seed=request.seed,
        seed_ms=request.window_ms if request.once else 0, reserved_for=request.reserved_for,
        reserve_ms=request.reserved_ms, body_ended=request.replace == "ended",
    )  # fmt: skip
