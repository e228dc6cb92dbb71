"""Decide what a run does when it does not get its lock. Pure functions: :mod:`.outcomes` applies the decision.

A new policy also needs its name in :mod:`..options.values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..options.durations import as_seconds
from ..options.lock_options import LockOptions
from ..store.holder_model import Holder, held_by, shown_time
from ..store.model import CUT, Duplicate, Held, Parked, Queued, Refusal, Unknown, Used

__all__ = [
    "AckParked",
    "ConflictContext",
    "Decision",
    "DropDuplicate",
    "Fail",
    "Park",
    "ParkDuplicate",
    "RequeueDuplicate",
    "RetryLater",
    "ReturnFirstResult",
    "Skip",
    "Wait",
    "decide",
]

_RUNNING = "another delivery of this message is running"
#: Seconds until a duplicate delivery is tried again: the first delay, and the maximum. Each try doubles the delay.
DUPLICATE_DELAY, DUPLICATE_DELAY_MAX = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class ConflictContext:
    """The state of a call, as far as a decision depends on it.

    Args:
        retries: How often the task has retried itself (``self.retry()``).
        conflict_retries: How often the message was republished because the lock was held.
        store_retries: How often the message was republished for another reason since its last conflict.
        waited: The call has waited in its pool slot (``wait``), so ``on_conflict`` applies.
        parking: The refused request already asked the store to park the message, so the queue is full.
        parking_duplicate: The request asked the store to park the message although its lock's holder runs it.
        eager: The call was made by ``apply()`` and has no message.
        task_id: The id of the call's task.
        jitter: A random number from 0 to 1.
    """

    retries: int = 0
    conflict_retries: int = 0
    store_retries: int = 0
    waited: bool = False
    parking: bool = False
    parking_duplicate: bool = False
    eager: bool = False
    task_id: str = ""
    jitter: float = 1.0


@dataclass(frozen=True, slots=True)
class Skip:
    """End the task REVOKED, or with its ``skip_result``."""

    reason: str


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Publish the raw message again.

    Args:
        delay: Seconds until the message may run.
        reason: The conflict.
        counts: Count this retry for ``retry_limit``.
    """

    delay: float
    reason: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class RequeueDuplicate:
    """Publish a duplicate delivery again: if the running one dies, the message is not lost."""

    delay: float
    reason: str


@dataclass(frozen=True, slots=True)
class ParkDuplicate:
    """Park a duplicate delivery before all waiters: if the running one dies, this one runs next.

    Args:
        reason: The conflict.
        otherwise: What to do with a message that cannot be parked.
    """

    reason: str
    otherwise: RequeueDuplicate


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait in the pool slot for the release, for at most ``timeout`` seconds."""

    timeout: float
    reason: str


@dataclass(frozen=True, slots=True)
class Park:
    """Park the message in the store until it is granted the lock.

    Args:
        position: The expected position among the waiters. Parking may yield another one.
        reason: The conflict.
    """

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class AckParked:
    """The message is parked: acknowledge it.

    Args:
        reason: Why it waits.
        duplicate: Another delivery of the message is running, so this one shows no state.
    """

    reason: str
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """End the task FAILURE with ``LockHeld``, ``NameUsed`` or ``UnknownOutcome``, as ``why`` says."""

    reason: str
    why: Literal["held", "used", "unknown"] = "held"


@dataclass(frozen=True, slots=True)
class ReturnFirstResult:
    """End the task SUCCESS with the result of the run ``task_id``. If that result has expired, skip the task."""

    task_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DropDuplicate:
    """Acknowledge the message and change nothing: its end is stored already."""

    reason: str


Decision = (
    Skip
    | RetryLater
    | RequeueDuplicate
    | Wait
    | Park
    | ParkDuplicate
    | AckParked
    | Fail
    | ReturnFirstResult
    | DropDuplicate
)


def decide(refusal: Refusal, options: LockOptions, context: ConflictContext) -> Decision:
    """Return what to do with a message that did not get its lock."""
    match refusal:
        case Duplicate():
            return DropDuplicate("this message has finished already")
        case Used() | Unknown():
            return _after_earlier_run(refusal, options)
        case Held(holder, same_message):
            if same_message:
                # Do not wait much longer than the holder's lease lasts: if the holder is dead, this message has to run.
                doubled = DUPLICATE_DELAY * 2.0 ** min(context.store_retries, 60)
                delay = min(DUPLICATE_DELAY_MAX, doubled, holder.expires_in + DUPLICATE_DELAY / 2)
                requeue = RequeueDuplicate(delay, _RUNNING)
                return ParkDuplicate(_RUNNING, requeue) if _parks_duplicates(options, context) else requeue
            return (
                _wait_first(refusal, options, context)
                or _about_to_release(holder, options, context)
                or _by_policy(holder, options, context)
            )
        case Queued(waiting, _, holder):
            return _wait_first(refusal, options, context) or _queue_policy(waiting, holder, options, context)
        case Parked(_, position):
            duplicate = context.parking_duplicate and not position
            return AckParked(_RUNNING if duplicate else "parked already", duplicate)
    raise AssertionError(refusal)  # the lock client retries a tombstoned acquisition itself


def _wait_first(refusal: Held | Queued, options: LockOptions, context: ConflictContext) -> Wait | None:
    if not options.wait or context.waited or refusal.awaited is None:
        return None
    return Wait(as_seconds(options.wait), held_by(refusal.awaited))


def _parks_duplicates(options: LockOptions, context: ConflictContext) -> bool:
    """Return whether the store keeps a duplicate delivery before all waiters.

    With ``limit``, a free seat would be granted to the duplicate while the first delivery runs on another one. Under
    ``debounce`` and ``replace``, the newest call runs next, not the first one.
    """
    plain = options.on_conflict == "queue" and options.debounce is None and options.limit == 1
    return plain and not context.parking_duplicate


def _about_to_release(holder: Holder, options: LockOptions, context: ConflictContext) -> RetryLater | None:
    """Return a retry if the body of the holder has ended, so the lock is about to be free. Otherwise return None.

    The holder still runs its hooks, or waits for its result backend. The policy does not apply, because this call may
    be the holder's own retry or the next step of its chain.
    """
    if not holder.releasing or context.eager:
        return None
    reason = f"{held_by(holder)}, whose body has ended"
    return RetryLater(_backoff(options, context.store_retries, context.jitter), reason, counts=False)


def _by_policy(holder: Holder, options: LockOptions, context: ConflictContext) -> Decision:
    policy, reason = options.on_conflict, _held_by(holder, options, context)
    if policy == "skip" and context.retries and not context.eager:
        # The task has run before, so its work is half done: it must not end here.
        policy = "retry"
    if policy == "skip":
        return Skip(reason)
    if policy == "raise":
        return Fail(reason)
    if context.eager:
        return Fail(f"{reason}; an eager call has no message to retry")
    if options.retry_limit is not None and context.conflict_retries >= options.retry_limit:
        tries = "1 try" if context.conflict_retries == 1 else f"{context.conflict_retries} tries"
        return Fail(f"{reason}; given up after {tries} (retry_limit)")
    return RetryLater(_conflict_delay(options, context), reason)


def _queue_policy(waiting: int, holder: Holder | None, options: LockOptions, context: ConflictContext) -> Decision:
    reason = _held_by(holder, options, context) if holder else "other calls are queued before this one"
    if context.eager:
        return Fail(f"{reason}; an eager call has no message to park")
    if not context.parking:
        if options.debounce is not None and not context.retries:
            reason = f"waits until no newer call has come for {options.debounce_ms[0] / 1000:g} s (debounce)"
            return Park(1, reason)
        return Park(1 if options.replaces else waiting + 1, reason)
    # The queue is full. If the holder is about to release the lock, the first waiter leaves the queue: retry then.
    if holder and (soon := _about_to_release(holder, options, context)):
        return soon
    reason = f"{reason}; {waiting} already waiting (queue_limit)"
    if options.queue_overflow != "skip":
        return Fail(reason)
    # A task that has run before has half its work done: it must not end here.
    return RetryLater(_conflict_delay(options, context), reason) if context.retries else Skip(reason)


def _held_by(holder: Holder, options: LockOptions, context: ConflictContext) -> str:
    waited = f"; waited {as_seconds(options.wait):g} s (wait)" if options.wait and context.waited else ""
    return held_by(holder) + waited


def _conflict_delay(options: LockOptions, context: ConflictContext) -> float:
    return _backoff(options, context.conflict_retries, context.jitter)


def _backoff(options: LockOptions, times: int, jitter: float) -> float:
    """Return a delay that doubles with each try, times a random factor from 0.5 to 1, so that retries spread out."""
    doubled = as_seconds(options.retry_delay) * 2.0 ** min(times, 60)
    return min(as_seconds(options.retry_delay_max), doubled) * (0.5 + 0.5 * jitter)


def _after_earlier_run(earlier: Used | Unknown, options: LockOptions) -> Decision:
    by = earlier.by
    if isinstance(earlier, Unknown):
        return Fail(_outcome_unknown(by), "unknown")
    if earlier.same_message and earlier.result_stored:
        return DropDuplicate("this message has finished already")
    if options.on_used == "raise":
        return Fail(_used_by(by), "used")
    if options.on_used == "return" and not earlier.same_message and by.task_id and len(by.task_id) < CUT:
        return ReturnFirstResult(by.task_id, _used_by(by))
    return Skip(_used_by(by))


def _outcome_unknown(by: Holder) -> str:
    return (
        f"outcome unknown: {by} started at {shown_time(by.since)} and its process died (after_crash='hold'). "
        f"Call {by.task}.resolve(<arguments>, sent=True) if it did its work, sent=False if not"
    )


def _used_by(by: Holder) -> str:
    return f"already done by {by} at {shown_time(by.since)} (once_per)"
