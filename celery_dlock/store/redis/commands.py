"""Commands of the Redis store. Each is a script variant, with keys and arguments in the order of its header.

Each builder has the name of its script. The first key determines the server that runs the command.
"""
# ruff: noqa: D103 - the header of its script describes what a command does

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final, TypeAlias

from ..base import ReleaseRequest
from ..claim_model import ClaimRequest
from ..model import AcquireRequest, Grant, QueueRequest, Renewal
from . import scripts
from .keys import LockKeys
from .scripts import ScriptVariant

__all__ = [
    "DONE_MS",
    "TOMBSTONE_MS",
    "Command",
    "acquire",
    "adopt_token",
    "claim",
    "confirm_publish",
    "decline_grant",
    "extend_claim",
    "forget_run",
    "inspect",
    "last_run",
    "list_due_queues",
    "list_waiters",
    "mark_done",
    "pass_on_wake",
    "release",
    "release_claim",
    "remove_waiter",
    "renew",
    "resolve_run",
    "save_worker_record",
    "start_quarantine",
    "sweep",
    "sweep_lease",
]

#: A script variant, and the texts to send: keys, then arguments.
Command: TypeAlias = tuple[ScriptVariant, tuple[str, ...]]

#: Life of a done mark in milliseconds: longer than the time in which a broker redelivers a message (Redis: 1 h by
#: default).
DONE_MS: Final = 24 * 3600 * 1000
#: Life of a tombstone in milliseconds: longer than a command can wait in a socket or in a stopped server's queue.
TOMBSTONE_MS: Final = 10 * 60 * 1000

_DONE, _TOMBSTONE = str(DONE_MS), str(TOMBSTONE_MS)
# The variants of a script, indexed by the presence of each group, in the order of the header.
_ACQUIRE: Final = scripts.ACQUIRE.variants
#: The variants of most calls: for a message, and for a ``Lock`` outside of any message.
_ACQUIRE_FOR_MESSAGE, _ACQUIRE_FOR_LOCK = scripts.ACQUIRE.variant("message"), scripts.ACQUIRE.variant()
_ACQUIRE_QUEUED: Final = scripts.ACQUIRE_QUEUED.variants
_ADOPT_TOKEN: Final = scripts.ADOPT_TOKEN.variants
_RELEASE: Final = scripts.RELEASE.variants
_RELEASE_FOR_MESSAGE, _RELEASE_FOR_LOCK = scripts.RELEASE.variant("message"), scripts.RELEASE.variant()
_RELEASE_CLAIM: Final = scripts.RELEASE_CLAIM.variants
_RELEASE_QUEUED: Final = scripts.RELEASE_QUEUED.variants
_CLAIM: Final = scripts.CLAIM.variant()
_CONFIRM_PUBLISH: Final = scripts.CONFIRM_PUBLISH.variant()
_EXTEND_CLAIM: Final = scripts.EXTEND_CLAIM.variant()
_FORGET_RUN: Final = scripts.FORGET_RUN.variant()
_INSPECT: Final = scripts.INSPECT.variant()
_LAST_RUN: Final = scripts.LAST_RUN.variant()
_LIST_DUE_QUEUES: Final = scripts.LIST_DUE_QUEUES.variant()
_LIST_WAITERS: Final = scripts.LIST_WAITERS.variant()
_MARK_DONE: Final = scripts.MARK_DONE.variant()
_DECLINE_GRANT: Final = scripts.DECLINE_GRANT.variant()
_PASS_ON_WAKE: Final = scripts.PASS_ON_WAKE.variant()
_REMOVE_WAITER: Final = scripts.REMOVE_WAITER.variant()
_RENEW: Final = scripts.RENEW.variant()
_RENEW_STOPPABLE: Final = scripts.RENEW.variant("stoppable")
_RESOLVE_RUN: Final = scripts.RESOLVE_RUN.variant()
_SAVE_WORKER_RECORD: Final = scripts.SAVE_WORKER_RECORD.variant()
_START_QUARANTINE: Final = scripts.START_QUARANTINE.variant()
_SWEEP: Final = scripts.SWEEP.variant()
_SWEEP_LEASE: Final = scripts.SWEEP_LEASE.variant()


# -- locks


def acquire(
    keys: LockKeys,
    acquisition: str,
    ttl_ms: int,
    request: AcquireRequest,
    quarantine: tuple[str, ...] = (),
) -> Command:
    """Return the command that takes a lock. A request with a place in the queue runs the script acquire_queued.

    Args:
        keys: Keys of the lock.
        acquisition: Owner and number.
        ttl_ms: Milliseconds that the lock is held without a renewal.
        request: The caller, its message, and the task's options.
        quarantine: Milliseconds of a quarantine, and failover epoch; empty if the store has no quarantine.
    """
    if request.queue is not None:
        return _acquire_queued(keys, acquisition, ttl_ms, request, request.queue, quarantine)
    names: tuple[str, ...]
    if request.identity is None:
        variant, identity = _ACQUIRE_FOR_LOCK, ""
        names = keys.lock, keys.last, keys.tombstone(acquisition)
    else:
        variant, identity = _ACQUIRE_FOR_MESSAGE, request.identity.digest
        names = keys.lock, keys.last, keys.tombstone(acquisition), keys.done(identity)
    task, task_id, node, pid = request.requester
    args: tuple[str, ...] = (
        acquisition,
        f"{ttl_ms}",
        identity,
        f"{request.age_us}",
        ("2" if request.waited else "1") if request.notify else "0",
        task,
        task_id,
        f"{node} {pid}",
    )
    again = request.redelivered or request.republished or request.rank_us is not None
    if not (again or request.min_hold_ms or request.once or quarantine):  # most calls
        return variant, names + args
    if again:
        args += _of_copy(request)
    if request.min_hold_ms:
        args += (str(request.min_hold_ms),)
    once = request.once and identity != ""
    if once:
        names += (keys.run(request.tick), keys.unsettled())
        args += _of_run(request)
    if quarantine:
        names += (keys.quarantine(),)
        args += quarantine
    return _ACQUIRE[identity != "", once, again, request.min_hold_ms > 0, quarantine != ()], names + args


def _acquire_queued(
    keys: LockKeys,
    acquisition: str,
    ttl_ms: int,
    request: AcquireRequest,
    place: QueueRequest,
    quarantine: tuple[str, ...],
) -> Command:
    """Return the command that takes a lock, or parks the message that has to wait.

    Args:
        keys: Keys of the lock.
        acquisition: Owner and number.
        ttl_ms: Milliseconds that the lock is held without a renewal.
        request: The caller, its message, and the task's options. It has an identity.
        place: The message to park, and its place in the queue.
        quarantine: Length of a quarantine and failover epoch, if the store has a quarantine.
    """
    identity = request.identity.digest if request.identity else ""
    names: tuple[str, ...] = (keys.lock, keys.last, keys.tombstone(acquisition))
    if identity:
        names += (keys.done(identity),)
    task, task_id, node, pid = request.requester
    args: tuple[str, ...] = (
        acquisition,
        f"{ttl_ms}",
        identity,
        str(request.age_us),
        ("2" if request.waited else "1") if request.notify else "0",
        task,
        task_id,
        f"{node} {pid}",
        *_of_copy(request),
        keys.name,
        place.entry,
        str(place.limit),
        "1" if place.evict_oldest else "0",
        str(place.after_us),
        str(place.sent_us),
        place.grant_id,
        "1" if place.park_duplicate else "0",
    )
    if request.min_hold_ms:
        args += (str(request.min_hold_ms),)
    if request.once:
        names += (keys.run(request.tick), keys.unsettled())
        args += _of_run(request)
    names += (*keys.queue(), keys.dead(), keys.wake)
    if place.debounce:
        names += (keys.debounced(),)
        args += tuple(map(str, place.debounce))
    if place.replace:
        names += (keys.replaced(),)
        args += tuple(map(str, place.replace))
    if quarantine:
        names += (keys.quarantine(),)
        args += quarantine
    groups = request.once, request.min_hold_ms > 0, place.debounce != (), place.replace != (), quarantine != ()
    return _ACQUIRE_QUEUED[groups], names + args


def _of_copy(request: AcquireRequest) -> tuple[str, ...]:
    may_be_copied = request.republished or request.redelivered
    rank_us = "" if request.rank_us is None else str(request.rank_us)
    return "1" if request.redelivered else "0", "1" if may_be_copied else "0", rank_us, str(request.doubt_us)


def _of_run(request: AcquireRequest) -> tuple[str, ...]:
    return request.requester.text, str(request.run_mark_ms), "1" if request.hold_if_unknown else "0"


def renew(lock: str, renewal: Renewal) -> Command:
    _, acquisition, ttl_ms, fields, stoppable = renewal
    texts = lock, acquisition, str(ttl_ms)
    variant = _RENEW_STOPPABLE if stoppable else _RENEW
    return variant, (*texts, *(text for fact in fields for text in fact)) if fields else texts


def release(keys: LockKeys, acquisition: str, request: ReleaseRequest) -> Command:
    """Return the command that ends an acquisition. Under the policy ``"queue"``, it runs release_queued."""
    identity, reserved_for = request.identity, request.reserved_for
    names: tuple[str, ...] = keys.lock, keys.wake
    args: tuple[str, ...] = (acquisition,)
    if request.outcome_unknown:
        names += (keys.tombstone(acquisition),)
        args += (_TOMBSTONE, "1" if request.rolled_back else "0")
    if identity:
        names += (keys.done(identity),)
        args += (_DONE if request.final else "0",)
    if request.queue:
        return _release_queued(keys, request, names, args)
    if not (request.once or request.used_ms or request.outcome_unknown or reserved_for):  # most calls
        return _RELEASE_FOR_MESSAGE if identity else _RELEASE_FOR_LOCK, names + args
    once = identity != "" and (request.once or request.used_ms > 0)
    if once:
        names += (keys.run(request.tick), keys.unsettled())
        args += (identity, *_end_of_run(request))
    if reserved_for:
        args += (reserved_for, str(request.reserved_ms))
    return _RELEASE[identity != "", once, request.outcome_unknown, reserved_for != ""], names + args


def _release_queued(keys: LockKeys, request: ReleaseRequest, names: tuple[str, ...], args: tuple[str, ...]) -> Command:
    """Return the command that ends an acquisition and grants the lock to the next waiter.

    Args:
        keys: Keys of the lock.
        request: The marks to set, and the retry that follows.
        names: First keys, as for :func:`release`.
        args: First arguments, as for :func:`release`.
    """
    identity, reserved_for = request.identity, request.reserved_for
    args += (identity, keys.name)
    once = identity != "" and (request.once or request.used_ms > 0)
    if once:
        names += (keys.run(request.tick), keys.unsettled())
        args += _end_of_run(request)
    if reserved_for:
        args += (reserved_for, str(request.reserved_ms))
    names += keys.queue()
    replaces = identity != "" and request.replace != ""
    if replaces:
        names += (keys.replaced(),)
        args += ("1" if request.replace == "ended" else "0",)
    return _RELEASE_QUEUED[identity != "", once, request.outcome_unknown, reserved_for != "", replaces], names + args


def _end_of_run(request: ReleaseRequest) -> tuple[str, ...]:
    return str(request.used_ms), request.requester, request.seed, str(request.window_ms if request.once else 0)


def inspect(keys: LockKeys) -> Command:
    return _INSPECT, (keys.lock,)


def pass_on_wake(keys: LockKeys) -> Command:
    return _PASS_ON_WAKE, (keys.wake,)


def adopt_token(keys: LockKeys, acquisition: str, token: int, seed: str, tick: str, *, waited: bool) -> Command:
    if not seed:
        return _ADOPT_TOKEN[False, waited], (keys.lock, keys.last, acquisition, str(token))
    return _ADOPT_TOKEN[True, waited], (keys.lock, keys.last, keys.run(tick), acquisition, str(token), seed)


def start_quarantine(quarantine_record: str, quarantine_ms: str, failover_epoch: str) -> Command:
    return _START_QUARANTINE, (quarantine_record, quarantine_ms, failover_epoch)


# -- runs


def last_run(keys: LockKeys, tick: str) -> Command:
    return _LAST_RUN, (keys.lock, keys.run(tick))


def forget_run(keys: LockKeys, tick: str, shown_mark: str) -> Command:
    # By the id, the script recognises a second copy of this command.
    return _FORGET_RUN, (keys.lock, keys.run(tick), keys.unsettled(), uuid.uuid4().hex, shown_mark, _TOMBSTONE)


def resolve_run(keys: LockKeys, *, sent: bool, window_ms: int, tick: str, shown_mark: str) -> Command:
    state = "used" if sent else "cleared"
    names = (keys.lock, keys.run(tick), keys.unsettled())
    return _RESOLVE_RUN, (*names, uuid.uuid4().hex, shown_mark, state, str(window_ms))


def mark_done(keys: LockKeys, identity: str, owner: str, age_us: int) -> Command:
    return _MARK_DONE, (keys.lock, keys.done(identity), identity, _DONE, str(age_us), owner)


# -- claims of published messages


def claim(keys: LockKeys, request: ClaimRequest) -> Command:
    task_id, generation, life_ms, running, by, attempt = request
    waiting, messages, delayed, _ = keys.queue()
    names = (keys.claim(), keys.lock, waiting, messages, delayed, keys.tombstone(attempt))
    args = (task_id, str(life_ms), "1" if running else "0", str(generation), by.task, by.node, by.task_id, attempt)
    return _CLAIM, names + args


def release_claim(keys: LockKeys, task_id: str, generation: int, attempt: str) -> Command:
    if not attempt:
        return _RELEASE_CLAIM[(False,)], (keys.claim(), task_id, str(generation))
    names = (keys.claim(), keys.tombstone(attempt))
    return _RELEASE_CLAIM[(True,)], (*names, task_id, str(generation), attempt, _TOMBSTONE)


def extend_claim(keys: LockKeys, task_id: str, life_ms: int) -> Command:
    return _EXTEND_CLAIM, (keys.claim(), task_id, str(life_ms))


# -- queues


def sweep(
    keys: LockKeys, granter: str, grant_timeout_ms: int, max_tries: int, foreign_ms: int, pause_ms: int
) -> Command:
    names = (keys.lock, keys.wake, *keys.queue(), keys.dead(), keys.dead_letters(), keys.seats_record(), keys.absent())
    times = str(grant_timeout_ms), str(max_tries), str(foreign_ms), str(pause_ms)
    return _SWEEP, (*names, keys.name, granter, *times)


def confirm_publish(keys: LockKeys, identity: str, grant_timeout_ms: int) -> Command:
    _, messages, _, queues = keys.queue()
    return _CONFIRM_PUBLISH, (keys.lock, messages, queues, identity, keys.name, str(grant_timeout_ms))


def decline_grant(keys: LockKeys, grant: Grant, *, foreign: bool, present: bool) -> Command:
    origin = ("2" if present else "1") if foreign else "0"
    return _DECLINE_GRANT, (keys.lock, keys.queue()[3], grant.identity, grant.grant_id, keys.name, origin)


def remove_waiter(keys: LockKeys, identity: str, granter: str, *, dead_letter: bool, ended: bool) -> Command:
    names = (keys.lock, keys.wake, *keys.queue(), keys.dead(), keys.dead_letters(), keys.done(identity), keys.absent())
    return _REMOVE_WAITER, (*names, keys.name, identity, "0" if dead_letter else _DONE, granter, "1" if ended else "0")


def list_waiters(keys: LockKeys, limit: int) -> Command:
    return _LIST_WAITERS, (keys.lock, *keys.queue()[:3], keys.debounced(), str(limit))


def list_due_queues(indexes: Sequence[str], limit: int, within_us: int) -> Command:
    return _LIST_DUE_QUEUES, (*indexes, str(limit), str(within_us))


# -- workers


def sweep_lease(sweeper: str, worker: str, life_ms: int) -> Command:
    return _SWEEP_LEASE, (sweeper, worker, str(life_ms))


def save_worker_record(worker: str, process: str, record: str, life_ms: int) -> Command:
    return _SAVE_WORKER_RECORD, (worker, process, record, str(life_ms))
