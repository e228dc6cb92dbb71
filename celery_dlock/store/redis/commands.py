"""Commands of the Redis store: a script variant, with keys and arguments in the order of the script's header.

Each builder has the name of its script. The first key determines the server that runs the command.

Longer than 300 lines: it has a builder for each script, with one argument a line.
"""
# ruff: noqa: D103 - the header of its script describes what a command does

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final, TypeAlias

from ..base import ReleaseRequest
from ..model import AcquireRequest, Grant, QueueRequest, Renewal
from ..queue_model import ClaimRequest
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
    "extend_claim",
    "forget_run",
    "inspect",
    "last_run",
    "list_due_queues",
    "list_waiters",
    "mark_done",
    "pass_on",
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

#: Life of a done mark: longer than brokers redeliver (the visibility timeout of Redis is 1 h by default).
DONE_MS: Final = 24 * 3600 * 1000
#: Life of a tombstone: longer than a command can wait in a socket or in a stopped server's queue.
TOMBSTONE_MS: Final = 10 * 60 * 1000

_DONE, _TOMBSTONE = str(DONE_MS), str(TOMBSTONE_MS)
# Indexed by the presence of each group, in the order of the header.
_ACQUIRE: Final = scripts.ACQUIRE.variants
_ACQUIRE_QUEUED: Final = scripts.ACQUIRE_QUEUED.variants
_ADOPT_TOKEN: Final = scripts.ADOPT_TOKEN.variants
_RELEASE: Final = scripts.RELEASE.variants
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
_PASS_ON: Final = scripts.PASS_ON.variant()
_REMOVE_WAITER: Final = scripts.REMOVE_WAITER.variant()
_RENEW: Final = scripts.RENEW.variant()
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
    notify: str,
    quarantine: tuple[str, ...] = (),
) -> Command:
    """Return the command that takes a lock. A request with a place in the queue runs the script acquire_queued.

    Args:
        keys: Keys of the lock.
        acquisition: Owner and number.
        ttl_ms: Milliseconds that the lock is held without a renewal.
        request: The caller, and what it needs.
        notify: How a release wakes this topology's subscribers.
        quarantine: Length of a quarantine and failover epoch, if the store has a quarantine.
    """
    identity = request.identity.digest if request.identity else ""
    names: tuple[str, ...] = (keys.lock, keys.last, *keys.marks(acquisition, identity))
    args: tuple[str, ...] = (
        acquisition,
        str(ttl_ms),
        identity,
        "1" if request.redelivered else "0",
        "1" if request.republished or request.redelivered else "0",
        str(request.age_us),
        "" if request.rank_us is None else str(request.rank_us),
        notify if request.notify else "0",
        *request.requester,
        str(request.min_hold_ms),
    )
    if not (request.once or request.queue or quarantine):  # most calls
        return _ACQUIRE[identity != "", False, False], names + args
    if request.queue is not None:
        return _acquire_queued(keys, request, request.queue, names, args, quarantine)
    once = request.once and identity != ""
    if once:
        names += (keys.run(request.tick),)
        args += _of_run(request)
    if quarantine:
        names += (keys.quarantine(),)
        args += quarantine
    return _ACQUIRE[identity != "", once, quarantine != ()], names + args


def _acquire_queued(
    keys: LockKeys,
    request: AcquireRequest,
    place: QueueRequest,
    names: tuple[str, ...],
    args: tuple[str, ...],
    quarantine: tuple[str, ...],
) -> Command:
    """Return the command that takes a lock, or parks the message that has to wait.

    Args:
        keys: Keys of the lock.
        request: The caller, and what it needs. It has an identity.
        place: The message to park, and its place in the queue.
        names: First keys, as for :func:`acquire`.
        args: First arguments, as for :func:`acquire`.
        quarantine: Length of a quarantine and failover epoch, if the store has a quarantine.
    """
    args += (
        keys.name,
        place.entry,
        str(place.limit),
        "1" if place.evict_oldest else "0",
        str(place.after_us),
        place.grant_id,
    )
    if request.once:
        names += (keys.run(request.tick),)
        args += _of_run(request)
    names += (*keys.queue(), keys.dead())
    if quarantine:
        names += (keys.quarantine(),)
        args += quarantine
    return _ACQUIRE_QUEUED[request.once, quarantine != ()], names + args


def _of_run(request: AcquireRequest) -> tuple[str, ...]:
    return request.requester.text, str(request.run_mark_ms), "1" if request.hold_if_unknown else "0"


def renew(keys: LockKeys, renewal: Renewal) -> Command:
    facts = [text for fact in renewal.fields for text in fact]
    return _RENEW, (keys.lock, renewal.acquisition, str(renewal.ttl_ms), *facts)


def release(keys: LockKeys, acquisition: str, request: ReleaseRequest) -> Command:
    """Return the command that ends an acquisition. Under the policy ``"queue"``, it runs release_queued."""
    identity, reserved_for = request.identity, request.reserved_for
    names = (keys.lock, keys.channel, *keys.marks(acquisition, identity))
    args: tuple[str, ...] = acquisition, "0", "0"
    if request.outcome_unknown:
        args = acquisition, _TOMBSTONE, "1" if request.rolled_back else "0"
    if identity:
        args += (_DONE if request.final else "0",)
    if request.queue:
        return _release_queued(keys, request, names, args)
    if not (request.once or request.used_ms or reserved_for):  # most calls
        return _RELEASE[identity != "", False, False], names + args
    once = identity != "" and (request.once or request.used_ms > 0)
    if once:
        names += (keys.run(request.tick),)
        args += (identity, *_end_of_run(request))
    if reserved_for:
        args += (reserved_for, str(request.reserved_ms))
    return _RELEASE[identity != "", once, reserved_for != ""], names + args


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
        names += (keys.run(request.tick),)
        args += _end_of_run(request)
    if reserved_for:
        args += (reserved_for, str(request.reserved_ms))
    return _RELEASE_QUEUED[identity != "", once, reserved_for != ""], names + keys.queue() + args


def _end_of_run(request: ReleaseRequest) -> tuple[str, ...]:
    return str(request.used_ms), request.requester, request.seed, str(request.window_ms if request.once else 0)


def inspect(keys: LockKeys) -> Command:
    return _INSPECT, (keys.lock,)


def adopt_token(keys: LockKeys, acquisition: str, token: int, seed: str, tick: str) -> Command:
    if not seed:
        return _ADOPT_TOKEN[(False,)], (keys.lock, keys.last, acquisition, str(token))
    return _ADOPT_TOKEN[(True,)], (keys.lock, keys.last, keys.run(tick), acquisition, str(token), seed)


def start_quarantine(quarantine_record: str, quarantine_ms: str, failover_epoch: str) -> Command:
    return _START_QUARANTINE, (quarantine_record, quarantine_ms, failover_epoch)


# -- runs


def last_run(keys: LockKeys, tick: str) -> Command:
    return _LAST_RUN, (keys.lock, keys.run(tick))


def forget_run(keys: LockKeys, tick: str) -> Command:
    # The id distinguishes a second copy of this command from another command.
    return _FORGET_RUN, (keys.run(tick), uuid.uuid4().hex, _TOMBSTONE)


def resolve_run(keys: LockKeys, *, sent: bool, window_ms: int, tick: str) -> Command:
    state = "used" if sent else "cleared"
    return _RESOLVE_RUN, (keys.lock, keys.run(tick), uuid.uuid4().hex, state, str(window_ms))


def mark_done(keys: LockKeys, identity: str, owner: str, age_us: int) -> Command:
    return _MARK_DONE, (keys.lock, keys.done(identity), identity, _DONE, str(age_us), owner)


# -- claims of published messages


def claim(keys: LockKeys, request: ClaimRequest) -> Command:
    task_id, turn, life_ms, running, by, attempt, _ = request
    waiting, messages, delayed, _ = keys.queue()
    names = (keys.claim(), keys.lock, waiting, messages, delayed, keys.tombstone(attempt))
    args = (task_id, str(life_ms), "1" if running else "0", str(turn), by.task, by.node, by.task_id, attempt)
    return _CLAIM, names + args


def release_claim(keys: LockKeys, task_id: str, generation: int, attempt: str) -> Command:
    if not attempt:
        return _RELEASE_CLAIM[(False,)], (keys.claim(), task_id, str(generation))
    names = (keys.claim(), keys.tombstone(attempt))
    return _RELEASE_CLAIM[(True,)], (*names, task_id, str(generation), attempt, _TOMBSTONE)


def extend_claim(keys: LockKeys, task_id: str, life_ms: int) -> Command:
    return _EXTEND_CLAIM, (keys.claim(), task_id, str(life_ms))


# -- queues


def sweep(keys: LockKeys, granter: str, grant_timeout_ms: int, max_tries: int, foreign_ms: int) -> Command:
    names = (keys.lock, *keys.queue(), keys.dead(), keys.channel)
    return _SWEEP, (*names, keys.name, granter, str(grant_timeout_ms), str(max_tries), str(foreign_ms))


def confirm_publish(keys: LockKeys, identity: str, grant_timeout_ms: int) -> Command:
    _, messages, _, queues = keys.queue()
    return _CONFIRM_PUBLISH, (keys.lock, messages, queues, identity, keys.name, str(grant_timeout_ms))


def pass_on(keys: LockKeys, grant: Grant, *, foreign: bool, present: bool) -> Command:
    origin = ("2" if present else "1") if foreign else "0"
    return _PASS_ON, (keys.lock, keys.queue()[3], grant.identity, grant.grant_id, keys.name, origin)


def remove_waiter(keys: LockKeys, identity: str, granter: str, *, dead_letter: bool, ended: bool) -> Command:
    names = (keys.lock, *keys.queue(), keys.dead(), keys.done(identity), keys.channel)
    return _REMOVE_WAITER, (*names, keys.name, identity, "0" if dead_letter else _DONE, granter, "1" if ended else "0")


def list_waiters(keys: LockKeys, limit: int) -> Command:
    return _LIST_WAITERS, (keys.lock, *keys.queue()[:3], str(limit))


def list_due_queues(indexes: Sequence[str], limit: int, within_us: int) -> Command:
    return _LIST_DUE_QUEUES, (*indexes, str(limit), str(within_us))


# -- workers


def sweep_lease(sweeper: str, worker: str, life_ms: int) -> Command:
    return _SWEEP_LEASE, (sweeper, worker, str(life_ms))


def save_worker_record(worker: str, process: str, record: str, life_ms: int) -> Command:
    return _SAVE_WORKER_RECORD, (worker, process, record, str(life_ms))
