"""The wait for a held lock, in the caller's thread or pool slot.

A release wakes one waiter, which then asks for the lock. If it gets the lock, or finds it held again, the store
marks the lock. The release of a marked lock wakes the next waiter. In every other case the waiter passes the wake-up
on.

A wake-up is lost if the waiter's process dies or the store does not answer. Another waiter then gets the lock by its
slow poll. A wake-up is also lost if the circuit breaker is open: the waiter does not call a store that may be dead.

``tests/model/wakeups.py`` tries every order of these steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ..errors import StoreUnavailable
from ..keys.lock_name import LockName
from ..store.base import ReleaseListener
from ..store.holder_model import Holder
from ..store.model import AcquireRequest, Held, Queued, Refusal
from ..utils.clock import Clock
from .lease import Lease

__all__ = ["POLL", "Line", "RecentWake"]

#: Seconds between two polls of a waiter that no release wakes: the holder died, or the wake-up was lost.
POLL: Final = 2.0
#: Seconds from the end of the holder's lease to the next poll.
AFTER_EXPIRY: Final = 0.005
#: Seconds by which an idle server may end a wait too late: it looks at its timers ten times a second.
SERVER_LATE: Final = 0.1
#: For this many seconds after a process woke a waiter, its own blocking acquires of that lock join the line. Far less
#: than the life of a wake-up in the store (``scripts/lib/wake.lua``).
RECENT: Final = 0.1
#: A wait that ends within this many seconds found a wake-up already in the store. No other caller was waiting to take
#: that wake-up.
AT_ONCE: Final = 0.002


class RecentWake:
    """The last lock whose release by this process woke a waiter.

    If this process has just woken a waiter, its next blocking acquire joins the line before it asks for the lock.
    Otherwise a loop that releases a lock and takes it again would mostly get it before the woken waiter. That waiter
    would go to the end of the line each time.

    No wake-up is missed: the woken waiter takes the lock and wakes the next one at its release, or passes its wake-up
    on. If it dies, the caller gets the lock by its slow poll.

    Args:
        clock: The clock for the time since the release.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Several threads use these without a lock, so each value is replaced as a whole. A race between two threads
        # costs one of them its position in the line.
        self._last: tuple[LockName, float] | None = None
        self._alone: LockName | None = None

    def note(self, name: LockName) -> None:
        """Record that a release woke a waiter of this lock."""
        if self._alone == name:
            # This process took its own last wake-up, so no other caller waits. The next acquire asks for the lock
            # first, and does not join the line.
            self._alone = self._last = None
        else:
            self._last = name, self._clock.monotonic() + RECENT

    def note_alone(self, name: LockName) -> None:
        """Record that the wake-up was already in the store, so no other caller was waiting for this lock."""
        self._alone = name

    def joins_line(self, name: LockName) -> bool:
        """Return whether a caller that may wait for this lock joins the line before it asks for the lock."""
        last = self._last
        return last is not None and last[0] == name and self._clock.monotonic() < last[1]


class Line:
    """One caller that waits in line for a lock.

    Args:
        name: The lock name.
        acquire: Sends a request once.
        listener: Waits for a release.
        clock: The clock for the time to wait.
        recent: The last wake-up by this process.
        in_line: Waits in line for at most so many seconds, if the store transfers locks
            (:class:`~celery_dlock.store.base.LineListener`); None if it does not.
    """

    def __init__(
        self,
        name: LockName,
        acquire: Callable[[AcquireRequest], Lease | Refusal],
        listener: ReleaseListener,
        clock: Clock,
        recent: RecentWake,
        in_line: Callable[[AcquireRequest, float], Lease | bool] | None = None,
    ) -> None:
        self._name = name
        self._acquire = acquire
        self._listener = listener
        self._clock = clock
        self._recent = recent
        self._in_line = in_line
        #: This caller may have taken a wake-up, and no marked lock will wake the next waiter. So it has to pass the
        #: wake-up on.
        self._owes_wake = False

    def wait(
        self, request: AcquireRequest, answer: Lease | Refusal | None, timeout: float | None, *, while_releasing: bool
    ) -> Lease | Refusal:
        """Wait for the release of the lock, and acquire it. Return the last answer when the time is over.

        Args:
            request: The request, with ``notify``.
            answer: The refusal that this request got. Its script has marked the lock, so the release wakes a waiter.
                None: the caller has not asked for the lock (:class:`RecentWake`).
            timeout: Seconds to wait at most; None: without limit.
            while_releasing: Wait only while the holder has announced its release.

        Raises:
            StoreUnavailable: The store did not answer, or refused.
        """
        end = None if timeout is None else self._clock.monotonic() + timeout
        try:
            if answer is None:
                answer = self._ask_after(POLL if timeout is None else min(POLL, timeout), request)
            while isinstance(answer, Held | Queued) and (holder := answer.awaited) is not None:
                left = POLL if end is None else end - self._clock.monotonic()
                if left <= 0 or (while_releasing and not holder.releasing):
                    break
                # Keep the rank of the first attempt. Otherwise, each poll would put the waiter behind later ones.
                request = request._replace(rank_us=answer.rank_us)
                expiry = holder.expires_in + AFTER_EXPIRY
                exact = holder.kind == "min_hold" and expiry < POLL
                answer = self._ask_after(min(left, POLL, expiry), request, exact=exact)
        except StoreUnavailable:
            self._owes_wake = False  # the store would not wake another waiter either
            raise
        finally:
            if self._owes_wake:
                self._listener.pass_on()
        return answer

    def _ask_after(self, seconds: float, request: AcquireRequest, *, exact: bool = False) -> Lease | Refusal:
        """Wait for a release, at most ``seconds``, then send the request.

        Args:
            seconds: How long to wait.
            request: The request.
            exact: End the wait on time, not up to ``SERVER_LATE`` later: the lock becomes free then, without a release.
        """
        owed, self._owes_wake = self._owes_wake, True  # an exception may strike just after the wake-up
        began = self._clock.monotonic()
        if self._in_line is not None and not exact:
            got = self._in_line(request._replace(waited=True), seconds)
            if isinstance(got, Lease):
                self._owes_wake = False
                return got
            woken = got
        else:
            woken = self._wait_exactly(seconds) if exact else self._listener.wait(seconds)
        self._owes_wake = woken or owed
        if woken and self._clock.monotonic() - began < AT_ONCE:
            self._recent.note_alone(self._name)
        age_us = request.age_us + round((self._clock.monotonic() - began) * 1e6)
        answer = self._acquire(request._replace(waited=True, age_us=age_us))
        if isinstance(answer, Lease):
            self._owes_wake = False
        elif isinstance(answer, Held | Queued) and answer.holder is not None:
            self._owes_wake = _no_wake_follows(answer.holder)
        return answer

    def _wait_exactly(self, seconds: float) -> bool:
        """Wait for a release. Time the last part of the wait here, because the server may end it late.

        Return whether a release woke this caller.
        """
        end = self._clock.monotonic() + seconds
        if seconds > SERVER_LATE and self._listener.wait(seconds - SERVER_LATE):
            return True
        time.sleep(max(0.0, end - self._clock.monotonic()))
        return False


def _no_wake_follows(holder: Holder) -> bool:
    """Return whether the lock is held, but no release will follow that wakes the next waiter."""
    return holder.kind in ("min_hold", "keep_on_retry", "operator", "guard")
