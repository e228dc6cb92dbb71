"""Explain an overlap, a lost or a doubled message by a fault; by nothing if no fault explains it."""

from collections.abc import Sequence

from chaos.ends import Trail
from chaos.timeline import STEP, Run, Sent, Window

#: The task with `on_lost="abort"`.
ABORTS = "chaos.aborts"
PAUSES = ("pause worker, short", "pause worker, long", "gap")
CHILD_PAUSES = ("pause child, short", "pause child, long")
#: Not those after which the store answers the next command.
AWAY = (
    "pause store, short", "pause store, long", "restart store", "kill store", "cut", "black hole", "cut replies",
)  # fmt: skip
#: Seconds after the end of a body within which its lock is released.
RELEASED = 1.5
#: Seconds after the end of a body within which a message that was acknowledged early has its end.
ENDED = 1.5
#: Seconds from the moment at which the broker takes a message for lost until the holder's watchdog has left word.
WORD = 0.6


def why_overlapping(earlier: Run, later: Run, windows: Sequence[Window], ttl: float) -> tuple[str, bool]:
    """Why two were inside, the one with the older token and the one with the newer; and is that as promised?"""
    until = max(earlier.start, later.start)
    if any(w.kind == "FLUSHALL" and w.touches(earlier.start - STEP, until) for w in windows):
        return "data lost", True
    if _paused(earlier, until, windows) >= ttl / 2:
        return "holder paused", True
    if any(w.kind in AWAY and w.touches(earlier.start - ttl / 2, until) for w in windows):
        return _store_away(earlier, later, windows)
    return "no fault", False


def _store_away(earlier: Run, later: Run, windows: Sequence[Window]) -> tuple[str, bool]:
    stopped = [w for w in windows if w.kind in CHILD_PAUSES and earlier.pid in w.pids]
    if any(w.touches(later.start - STEP, later.start) for w in stopped):
        return "store away, holder paused", True
    if earlier.told > later.start:
        return "store away, holder NOT notified", False
    # Who is to be aborted must be out; the exception strikes at its next step.
    if earlier.task == ABORTS and earlier.end > later.start + STEP:
        return "store away, holder NOT aborted", False
    return "store away, holder notified", True


def _paused(run: Run, until: float, windows: Sequence[Window]) -> float:
    """Return the seconds without a possible renewal, or of a stop between the lock and the first step of the body."""
    total = 0.0
    for window in windows:
        before = window.start < run.start and window.end >= run.start - STEP
        if window.kind in PAUSES and window.main == run.main:
            total += window.shared(window.start if before else run.start, until)
        elif window.kind in CHILD_PAUSES and run.pid in window.pids and before:
            total += window.end - window.start
    return total


def why_lost(sent: Sent, trail: Trail, runs: Sequence[Run], windows: Sequence[Window], *, recorded: bool = True) -> str:
    """Why a message has neither an end nor a place; "" if it must not be so.

    Args:
        sent: The message.
        trail: What the workers' logs say of it.
        runs: The runs of its body.
        windows: The faults.
        recorded: Whether each worker that took it from the broker recorded it there.
    """
    if not recorded:
        return "taken from the broker and not recorded by kombu"
    if runs and runs[-1].how == "GreenletExit":
        # Celery's gevent pool reports a killed greenlet as a success, so that its message is acknowledged.
        return "killed in a gevent pool by a cold shutdown"
    last, at, log = trail[-1] if trail else ("", sent.at, "")
    after = [window for window in windows if window.end >= at - STEP]
    if last == "parked":
        return "store emptied while it was parked" if any(w.kind == "FLUSHALL" for w in after) else ""
    if sent.task.endswith("_early") and any(_ended(w) and w.log == log for w in after):
        return "acknowledged early, and its process died"
    return ""


def why_doubled(first: Run, again: float, acked: float, windows: Sequence[Window]) -> str:
    """Explain why a message that was done was not finished; "" if it must not be so.

    Args:
        first: The run that did it.
        again: When it began again.
        acked: When it was acknowledged, or `again`. On a busy machine that can be seconds after the end of the body.
        windows: The faults.
    """
    if first.task.endswith("_early"):
        acked = min(acked, first.end + ENDED)
    reasons = {
        "data lost": lambda w: w.kind == "FLUSHALL" and w.touches(first.start - STEP, again),
        "its process died before the acknowledgement": lambda w: (
            _ended(w) and _own(w, first) and w.touches(first.end - STEP, acked + STEP)
        ),
        "its process was paused": lambda w: (
            w.kind in PAUSES and _own(w, first) and w.touches(first.lost_from - STEP, acked + STEP)
        ),
        # It could not report its end to its worker, which therefore did not acknowledge the message.
        "its pool child was paused before the acknowledgement": lambda w: (
            w.kind in CHILD_PAUSES and first.pid in w.pids and first.end - STEP <= w.start <= acked
        ),
        "the broker was away at the acknowledgement": lambda w: (
            w.target == "broker" and w.touches(first.end - WORD, acked + STEP)
        ),
        "the store was away": lambda w: w.kind in AWAY and w.touches(first.lost_from - STEP, first.end + RELEASED),
    }
    return next((reason for reason, holds in reasons.items() if any(map(holds, windows))), "")


def _own(window: Window, run: Run) -> bool:
    return window.main == run.main or run.pid in window.pids


def _ended(window: Window) -> bool:
    return window.deadly or window.kind == "SIGQUIT"
