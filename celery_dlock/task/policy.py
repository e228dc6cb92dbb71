"""A refusal, the task's options and its situation become a decision. Pure: nothing is carried out here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..options.lock_options import LockOptions
from ..options.validation import as_seconds
from ..store.model import CUT, Duplicate, Held, Holder, Parked, Queued, Refusal, Unknown, Used, held_by, shown_time

__all__ = [
    "AckParked",
    "ConflictContext",
    "Decision",
    "DropDuplicate",
    "Fail",
    "Park",
    "RequeueDuplicate",
    "RetryLater",
    "ReturnFirstResult",
    "Skip",
    "Wait",
    "decide",
]

#: A twin comes back first after this many seconds, then after twice as many, up to the second figure.
TWIN_DELAY, TWIN_DELAY_MAX = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class ConflictContext:
    """What else a decision depends on.

    Args:
        retries: How often this task ran already (``self.retry()``).
        tries: How often this message was published again because the lock was held.
        comebacks: How often since then for another reason.
        waited: The task has waited in its slot, so ``after_wait`` speaks.
        parking: The message has brought its entry to be parked, so the queue is full.
        eager: Run by ``apply()``; there is no message that could be published again.
        task_id: Of the task that asks.
        jitter: A random number from 0 to 1.
    """

    retries: int = 0
    conflict_retries: int = 0
    store_retries: int = 0
    waited: bool = False
    parking: bool = False
    eager: bool = False
    task_id: str = ""
    jitter: float = 1.0


@dataclass(frozen=True, slots=True)
class Skip:
    """End the task REVOKED, or with the ``skip_result`` where it has one."""

    reason: str


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Publish the raw message again, to come back after ``delay`` s; ``counts``: that is one of its tries."""

    delay: float
    reason: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class RequeueDuplicate:
    """Publish this copy of a running message again, so that it is not lost if that run dies."""

    delay: float
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait in the worker slot for the release, at most ``timeout`` s."""

    timeout: float
    reason: str


@dataclass(frozen=True, slots=True)
class Park:
    """Leave the message in the store until its turn comes; ``position``: among those who wait, by a first look."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class AckParked:
    """The message is parked: acknowledge it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the task FAILURE: with ``LockHeld``, ``NameUsed`` or ``UnknownOutcome``."""

    reason: str
    why: Literal["held", "used", "unknown"] = "held"


@dataclass(frozen=True, slots=True)
class ReturnFirstResult:
    """End the task SUCCESS with the result of this run, as long as it is known; else skip it."""

    task_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DropDuplicate:
    """Acknowledge the message and touch nothing: its end is stored already."""

    reason: str


Decision = Skip | RetryLater | RequeueDuplicate | Wait | Park | AckParked | Fail | ReturnFirstResult | DropDuplicate


def decide(refusal: Refusal, options: LockOptions, situation: ConflictContext) -> Decision:
    """What to do with a message that did not get its lock."""
    match refusal:
        case Duplicate():
            return DropDuplicate("this message has run to its end already")
        case Used() | Unknown():
            return _after(refusal, options)
        case Held(holder, twin):
            if twin:
                # Not later than the lease would end if its holder were dead: then this copy is the one to run.
                growing = TWIN_DELAY * 2.0 ** min(situation.store_retries, 60)
                delay = min(TWIN_DELAY_MAX, growing, holder.expires_in + TWIN_DELAY / 2)
                return RequeueDuplicate(delay, "another copy of this message is running")
            return _about_to_release(holder, options, situation) or _by_policy(holder, options, situation)
        case Queued(waiting, _, holder):
            return _to_queue(waiting, holder, options, situation)
        case Parked():
            return AckParked("it waits for its turn")
    raise AssertionError(refusal)  # the locker retries a tombstoned acquisition itself


def _about_to_release(holder: Holder, options: LockOptions, situation: ConflictContext) -> RetryLater | None:
    """Return the retry of a call that meets a holder whose body has ended; None if the policy decides.

    Such a holder is no rival: it still runs its hooks, or waits for its result backend. The call may be its own retry,
    or the next step of its chain, which no policy may end.
    """
    waits_first = options.on_conflict == "wait" and not situation.waited
    if not holder.left or situation.eager or waits_first:
        return None
    reason = f"{held_by(holder)}, whose body has ended"
    return RetryLater(_growing(options, situation.store_retries, situation.jitter), reason, counts=False)


def _by_policy(holder: Holder, options: LockOptions, situation: ConflictContext) -> Decision:
    policy, waited = options.on_conflict, ""
    if policy == "wait":
        if not situation.waited:
            return Wait(as_seconds(options.wait_timeout), held_by(holder))
        policy = options.after_wait
        waited = f"; waited {as_seconds(options.wait_timeout):g} s (wait_timeout)"
    if policy == "skip" and situation.retries and not situation.eager:
        # It has run before: its work is half done, so it comes back instead of ending.
        policy = "retry"
    reason = held_by(holder) + waited
    if policy == "skip":
        return Skip(reason)
    if policy == "raise":
        return Fail(reason)
    if situation.eager:
        return Fail(f"{reason}; an eager call has no message that could be retried")
    if options.retry_limit is not None and situation.conflict_retries >= options.retry_limit:
        tries = "1 try" if situation.conflict_retries == 1 else f"{situation.conflict_retries} tries"
        return Fail(f"{reason}; given up after {tries} (retry_limit)")
    return RetryLater(_delay(options, situation), reason)


def _to_queue(waiting: int, holder: Holder | None, options: LockOptions, situation: ConflictContext) -> Decision:
    reason = held_by(holder) if holder else "others wait before it"
    if situation.eager:
        return Fail(f"{reason}; an eager call has no message that could be parked")
    if not situation.parking:
        return Park(waiting + 1, reason)
    # Its release hands the lock to the first who waits, and so makes room for one.
    if holder and (soon := _about_to_release(holder, options, situation)):
        return soon
    reason = f"{reason}; {waiting} wait already (queue_limit)"
    if options.queue_overflow != "skip":
        return Fail(reason)
    # What has run before is half done, so it comes back instead of ending.
    return RetryLater(_delay(options, situation), reason) if situation.retries else Skip(reason)


def _delay(options: LockOptions, situation: ConflictContext) -> float:
    return _growing(options, situation.conflict_retries, situation.jitter)


def _growing(options: LockOptions, times: int, jitter: float) -> float:
    """Doubling, with the upper half jittered, so that those who met at one lock do not meet again."""
    growing = as_seconds(options.retry_delay) * 2.0 ** min(times, 60)
    return min(as_seconds(options.retry_delay_max), growing) * (0.5 + 0.5 * jitter)


def _after(earlier: Used | Unknown, options: LockOptions) -> Decision:
    by = earlier.by
    if isinstance(earlier, Unknown):
        return Fail(_unknown_of(by), "unknown")
    if earlier.same:
        return DropDuplicate("this message has run to its end already")
    if options.on_used == "raise":
        return Fail(_used_by(by), "used")
    if options.on_used == "return" and by.task_id and len(by.task_id) < CUT:
        return ReturnFirstResult(by.task_id, _used_by(by))
    return Skip(_used_by(by))


def _unknown_of(by: Holder) -> str:
    return (
        f"nobody knows how far {by} came, which began at {shown_time(by.since)} and died "
        "(after_crash='hold'): settle it by the task's resolve(<its arguments>, sent=True or False)"
    )


def _used_by(by: Holder) -> str:
    return f"already done by {by} at {shown_time(by.since)} (once_per)"
