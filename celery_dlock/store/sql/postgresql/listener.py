"""Waits for the release of a lock in PostgreSQL (:mod:`.line`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from ....errors import ReplyLost, StoreUnavailable
from ...base import LineListener
from ...model import Acquired, AcquireRequest, Transferred
from .calls import Call, WaitingCalls
from .line import MOST_IN_LINE, SEPARATOR, start_of

__all__ = ["Listener"]

#: Seconds between two looks of a call that no release can tell: the first pause and the longest one.
_LOOK: Final = 0.002, 0.02
#: Seconds after its wait for which an entry counts as alive.
_LATE: Final = 1.0


class Listener(LineListener):
    """A call that waits for releases of one lock.

    Args:
        calls: The waiting calls of this process.
        ask: Returns the rows of a statement.
        sql: The statements.
        key: The name of the row.
        plain: Returns the values of the plain acquire; None if the request is not plain.
        pass_on: Wakes the next call of the line.
    """

    def __init__(
        self,
        calls: WaitingCalls,
        ask: Callable[[str, Any], list[tuple[Any, ...]]],
        sql: Any,
        key: str,
        plain: Callable[[str, int, AcquireRequest], dict[str, Any] | None],
        pass_on: Callable[[], None],
    ) -> None:
        self._calls, self._ask, self._sql, self._key, self._plain = calls, ask, sql, key, plain
        self._pass_on = pass_on

    def pass_on(self) -> None:
        with suppress(StoreUnavailable):
            self._pass_on()

    def wait(self, timeout: float) -> bool:
        name = f"~{uuid.uuid4().hex}"
        with self._calls.entered(name) as call:
            start = start_of(name, self._calls.channel)
            ((joined,),) = self._ask(self._sql.join_to_wake, self._joining(start, timeout))
            if not joined:
                return True  # a wake-up was kept for this call
            return self._told(call, name, start, timeout) is not False

    def _joining(self, start: str, seconds: float) -> dict[str, Any]:
        alive_us = round((seconds + _LATE) * 1e6)
        return {"name": self._key, "start": start, "alive_us": alive_us, "most": MOST_IN_LINE}

    def wait_in_line(
        self, acquisition: str, ttl_ms: int, request: AcquireRequest, seconds: float
    ) -> Transferred | bool:
        values = self._plain(acquisition, ttl_ms, request._replace(waited=False))
        if values is None:
            return self.wait(seconds)
        with self._calls.entered(acquisition) as call:
            start, identity = start_of(acquisition, self._calls.channel), values["identity"]
            values |= self._joining(start, seconds)
            values["rest"] = SEPARATOR.join(("", str(ttl_ms), identity, values["holder"]))
            # A duplicate of the holder's message does not wait for it like another call: the rules decide.
            values["same"] = f'["{identity}"' if identity else "-"
            found = self._ask(self._sql.join, values)
            if not found:
                return self.wait(seconds)
            owner, *facts, now = found[0]
            if owner != acquisition:
                try:
                    told = self._told(call, acquisition, start, seconds)
                except ReplyLost:
                    raise
                except StoreUnavailable as error:
                    # The line may still have this call, and a release may transfer the lock to it.
                    raise ReplyLost(str(error)) from error
                if not isinstance(told, list):
                    return told
                facts = told
            token, since, until = map(int, facts)
            rank = now - request.age_us if request.rank_us is None else request.rank_us
            return Transferred(Acquired(token, since / 1e6, rank), (until - now) / 1e6)

    def _told(self, call: Call, acquisition: str, start: str, seconds: float) -> list[Any] | bool:
        """Wait for a release, and leave the line. Return the facts about the lock if this call has got it.

        Otherwise return whether a release may have woken this call.
        """
        try:
            told = call.wait(seconds) if call.hears else self._watch(acquisition, start, seconds)
        except BaseException:
            with suppress(StoreUnavailable):
                self._ask(self._sql.leave, {"name": self._key, "start": start})
            raise
        if told is None:
            if self._ask(self._sql.leave, {"name": self._key, "start": start}):
                return call.deaf
            told = self._found(acquisition)
        return told or True

    def _found(self, acquisition: str) -> list[Any]:
        """Return the facts about the lock if the acquisition has it; nothing otherwise."""
        found = self._ask(self._sql.holds, {"name": self._key, "owner": acquisition})
        return list(found[0]) if found else []

    def _watch(self, acquisition: str, start: str, seconds: float) -> list[Any] | None:
        """Look at the row until this call is not in its line any more, for a call that does not hear releases."""
        end, pause = time.monotonic() + seconds, _LOOK[0]
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LOOK[1])
            if not self._ask(self._sql.in_line, {"name": self._key, "start": start}):
                return self._found(acquisition)
        return None
