"""Commands of the Redis store. Each is a script variant, with keys and arguments in the order of its header.

:func:`command` takes their values by the names in the header. The commands that every run of a task sends are built by
:func:`acquire`, :func:`renew` and :func:`release`, which know the order, because that is faster.
The first key determines the server that runs the command.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from ...keys.lock_name import ONE_LOCK, ONE_SEAT
from ..base import ReleaseRequest
from ..model import AcquireRequest, QueueRequest, Renewal
from .keys import LockKeys
from .scripts import SCRIPTS, ScriptVariant
from .scripts.seated import SEAT_SCRIPTS

__all__ = ["DONE_MS", "TOMBSTONE_MS", "Command", "acquire", "command", "release", "renew"]

#: A script variant, and the texts to send: keys, then arguments.
Command: TypeAlias = tuple[ScriptVariant, tuple[str, ...]]

#: Life of a done mark in milliseconds: longer than the time in which a broker redelivers a message (Redis: 1 h by
#: default).
DONE_MS: Final = 24 * 3600 * 1000
#: Life of a tombstone in milliseconds: longer than a command can wait in a socket or in a stopped server's queue.
TOMBSTONE_MS: Final = 10 * 60 * 1000

_DONE, _TOMBSTONE = str(DONE_MS), str(TOMBSTONE_MS)
# The variants of a script, indexed by the presence of each group, in the order of the header.
_ACQUIRE: Final = SCRIPTS["acquire"].variants
#: The variants of most calls: for a message, and for a ``Lock`` outside of any message.
_ACQUIRE_FOR_MESSAGE, _ACQUIRE_FOR_LOCK = SCRIPTS["acquire"].variant("message"), SCRIPTS["acquire"].variant()
_ACQUIRE_QUEUED: Final = SCRIPTS["acquire_queued"].variants
_RELEASE: Final = SCRIPTS["release"].variants
_RELEASE_FOR_MESSAGE, _RELEASE_FOR_LOCK = SCRIPTS["release"].variant("message"), SCRIPTS["release"].variant()
_RELEASE_QUEUED: Final = SCRIPTS["release_queued"].variants
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
        given: Arguments, and keys that need more than the lock name, by their names in the header.
    """
    scripts = SCRIPTS if seats in (ONE_LOCK, ONE_SEAT) or script not in SEAT_SCRIPTS else SEAT_SCRIPTS
    variant = scripts[script].variant(*groups)
    known = dict(given)
    if keys is not None:
        known |= {"lock": keys.lock, "last_token": keys.last, "lock_name": keys.name, "seat_limit": seats}
    if unknown := given.keys() - {*variant.keys, *variant.args}:
        raise TypeError(f"{script}.lua has no key or argument of the name {', '.join(sorted(unknown))}")
    values = [known[name] if keys is None or name in known else keys.named(name) for name in variant.keys]
    values += [known[name] for name in variant.args]
    return variant, tuple(text for value in values for text in _texts(value))


def _texts(value: str | int | Iterable[str]) -> Iterable[str]:
    if isinstance(value, str):
        return (value,)
    return (f"{value:d}",) if isinstance(value, int) else value


def acquire(
    keys: LockKeys,
    acquisition: str,
    ttl_ms: int,
    request: AcquireRequest,
    quarantine: tuple[str, ...] = (),
) -> Command:
    """Return the command that takes a lock. A request that may wait in the queue runs the script acquire_queued.

    Args:
        keys: Keys of the lock.
        acquisition: Owner and number.
        ttl_ms: Milliseconds that the lock is held without a renewal.
        request: The caller, its message, and the task's options.
        quarantine: Milliseconds of a quarantine, and failover epoch; empty if the store has no quarantine.
    """
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
    if request.queue is not None:
        return _acquire_queued(keys, request, request.queue, quarantine, names, args)
    again = request.redelivered or request.republished or request.rank_us is not None
    if not (again or request.min_hold_ms or request.once or quarantine):  # most calls
        return variant, names + args
    if again:
        args += _of_copy(request)
    if request.min_hold_ms:
        args += (str(request.min_hold_ms),)
    once = request.once and identity != ""
    if once:
        names += (keys.run(request.tick), keys.named("unsettled"))
        args += _of_run(request)
    if quarantine:
        names += (keys.named("quarantine"),)
        args += quarantine
    return _ACQUIRE[identity != "", once, again, request.min_hold_ms > 0, quarantine != ()], names + args


def _acquire_queued(
    keys: LockKeys,
    request: AcquireRequest,
    queue: QueueRequest,
    quarantine: tuple[str, ...],
    names: tuple[str, ...],
    args: tuple[str, ...],
) -> Command:
    """Return the command that takes a lock, or parks the message that has to wait.

    Args:
        keys: Keys of the lock.
        request: The caller, its message, and the task's options. It has an identity.
        queue: The message to park, and its place in the queue.
        quarantine: As for :func:`acquire`.
        names: First keys, as for :func:`acquire`.
        args: First arguments, as for :func:`acquire`.
    """
    args += (
        *_of_copy(request),
        keys.name,
        queue.entry,
        str(queue.limit),
        "1" if queue.evict_oldest else "0",
        str(queue.after_us),
        str(queue.sent_us),
        queue.grant_id,
        "1" if queue.park_duplicate else "0",
    )
    if request.min_hold_ms:
        args += (str(request.min_hold_ms),)
    if request.once:
        names += (keys.run(request.tick), keys.named("unsettled"))
        args += _of_run(request)
    names += (*keys.queue(), keys.named("dead"), keys.wake)
    if queue.debounce:
        names += (keys.named("debounced"),)
        args += tuple(map(str, queue.debounce))
    if queue.replace:
        names += (keys.named("replaced"),)
        args += tuple(map(str, queue.replace))
    if quarantine:
        names += (keys.named("quarantine"),)
        args += quarantine
    once, hold, quarantined = request.once, request.min_hold_ms > 0, quarantine != ()
    groups = once, hold, queue.debounce is not None, queue.replace is not None, quarantined
    return _ACQUIRE_QUEUED[groups], names + args


def _of_copy(request: AcquireRequest) -> tuple[str, ...]:
    may_be_copied = request.republished or request.redelivered
    rank_us = "" if request.rank_us is None else str(request.rank_us)
    return "1" if request.redelivered else "0", "1" if may_be_copied else "0", rank_us, str(request.doubt_us)


def _of_run(request: AcquireRequest) -> tuple[str, ...]:
    return request.requester.text, str(request.run_mark_ms), "1" if request.hold_if_unknown else "0"


def renew(lock: str, renewal: Renewal) -> Command:
    """Return the command that renews a lease."""
    texts = lock, renewal.acquisition, str(renewal.ttl_ms)
    variant = _RENEW_STOPPABLE if renewal.stoppable else _RENEW
    return variant, (*texts, *(text for field in renewal.fields for text in field)) if renewal.fields else texts


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
        names += (keys.run(request.tick), keys.named("unsettled"))
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
        names += (keys.run(request.tick), keys.named("unsettled"))
        args += _end_of_run(request)
    if reserved_for:
        args += (reserved_for, str(request.reserved_ms))
    names += keys.queue()
    replaces = identity != "" and request.replace != ""
    if replaces:
        names += (keys.named("replaced"),)
        args += ("1" if request.replace == "ended" else "0",)
    return _RELEASE_QUEUED[identity != "", once, request.outcome_unknown, reserved_for != "", replaces], names + args


def _end_of_run(request: ReleaseRequest) -> tuple[str, ...]:
    return str(request.used_ms), request.requester, request.seed, str(request.window_ms if request.once else 0)
