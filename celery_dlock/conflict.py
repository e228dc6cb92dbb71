"""A refusal, the task's options and its situation become a decision. Pure: nothing is carried out here."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from .durations import as_seconds
from .options import LockOptions
from .records import CUT, Duplicate, Held, Holder, Parked, Queued, Refusal, Unknown, Used

__all__ = [
    "Again",
    "Await",
    "Decision",
    "Drop",
    "Fail",
    "Park",
    "PutBack",
    "Recall",
    "Situation",
    "Skip",
    "Wait",
    "decide",
    "held_by",
]

#: A twin comes back first after this many seconds, then after twice as many, up to the second figure.
TWIN_DELAY, TWIN_DELAY_MAX = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Situation:
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
    tries: int = 0
    comebacks: int = 0
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
class Again:
    """Publish the raw message again, to come back after ``delay`` s."""

    delay: float
    reason: str


@dataclass(frozen=True, slots=True)
class PutBack:
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
class Await:
    """The message is parked: acknowledge it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the task FAILURE: with ``LockHeld``, ``NameUsed`` or ``UnknownOutcome``."""

    reason: str
    why: Literal["held", "used", "unknown"] = "held"


@dataclass(frozen=True, slots=True)
class Recall:
    """End the task SUCCESS with the result of this run, as long as it is known; else skip it."""

    task_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Acknowledge the message and touch nothing: its end is stored already."""

    reason: str


Decision = Skip | Again | PutBack | Wait | Park | Await | Fail | Recall | Drop


def decide(refusal: Refusal, options: LockOptions, situation: Situation) -> Decision:
    """What to do with a message that did not get its lock."""
    match refusal:
        case Duplicate():
            return Drop("this message has run to its end already")
        case Used() | Unknown():
            return _after(refusal, options)
        case Held(holder, twin):
            if twin:
                # Not later than the lease would end if its holder were dead: then this copy is the one to run.
                growing = TWIN_DELAY * 2.0 ** min(situation.comebacks, 60)
                delay = min(TWIN_DELAY_MAX, growing, holder.expires_in + TWIN_DELAY / 2)
                return PutBack(delay, "another copy of this message is running")
            own = _precedes(holder, situation)
            return Again(_delay(options, situation), held_by(holder)) if own else _by_policy(holder, options, situation)
        case Queued(waiting, _, holder):
            return _to_queue(waiting, holder, options, situation)
        case Parked():
            return Await("it waits for its turn")
    raise AssertionError(refusal)  # the locker retries a tombstoned acquisition itself


def _precedes(holder: Holder, situation: Situation) -> bool:
    """Is it the run that this one retries, which takes long to release? That is no rival."""
    mine = holder.task_id == situation.task_id[:CUT]
    return mine and holder.left and situation.retries > 0 and not situation.eager


def _by_policy(holder: Holder, options: LockOptions, situation: Situation) -> Decision:
    policy = options.on_conflict
    if policy == "wait":
        if not situation.waited:
            return Wait(as_seconds(options.wait_timeout), held_by(holder))
        policy = options.after_wait
    if policy == "skip" and situation.retries and not situation.eager:
        # It has run before: its work is half done, so it comes back instead of ending.
        policy = "retry"
    reason = held_by(holder)
    if policy == "skip":
        return Skip(reason)
    if policy == "raise":
        return Fail(reason)
    if situation.eager:
        return Fail(f"{reason}; an eager call has no message that could be retried")
    if options.retry_limit is not None and situation.tries >= options.retry_limit:
        tries = "1 try" if situation.tries == 1 else f"{situation.tries} tries"
        return Fail(f"{reason}; given up after {tries} (retry_limit)")
    return Again(_delay(options, situation), reason)


def _to_queue(waiting: int, holder: Holder | None, options: LockOptions, situation: Situation) -> Decision:
    reason = held_by(holder) if holder else "others wait before it"
    if situation.eager:
        return Fail(f"{reason}; an eager call has no message that could be parked")
    if not situation.parking:
        return Park(waiting + 1, reason)
    reason = f"{reason}; {waiting} wait already (queue_limit)"
    if options.queue_overflow != "skip":
        return Fail(reason)
    # What has run before is half done, so it comes back instead of ending.
    return Again(_delay(options, situation), reason) if situation.retries else Skip(reason)


def _delay(options: LockOptions, situation: Situation) -> float:
    """Doubling, with the upper half jittered, so that those who met at one lock do not meet again."""
    growing = as_seconds(options.retry_delay) * 2.0 ** min(situation.tries, 60)
    return min(as_seconds(options.retry_delay_max), growing) * (0.5 + 0.5 * situation.jitter)


def held_by(holder: Holder) -> str:
    """Who holds it, where and since when, for people."""
    return f"held by {holder} since {_when(holder.since)}"


def _after(earlier: Used | Unknown, options: LockOptions) -> Decision:
    by = earlier.by
    if isinstance(earlier, Unknown):
        return Fail(_unknown_of(by), "unknown")
    if earlier.same:
        return Drop("this message has run to its end already")
    if options.on_used == "raise":
        return Fail(_used_by(by), "used")
    if options.on_used == "return" and by.task_id and len(by.task_id) < CUT:
        return Recall(by.task_id, _used_by(by))
    return Skip(_used_by(by))


def _unknown_of(by: Holder) -> str:
    return (
        f"nobody knows how far {by} came, which began at {_when(by.since)} and died "
        "(after_crash='hold'): settle it by the task's resolve(<its arguments>, sent=True or False)"
    )


def _used_by(by: Holder) -> str:
    return f"already done by {by} at {_when(by.since)} (once_per)"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
