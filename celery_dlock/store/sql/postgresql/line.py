"""The line of the calls that wait for a lock, in the row of its name.

A plain release transfers the lock to the first call of the line in its own statement. So no other call can take it in
between, and a lock that many calls want costs two statements a section. An entry of the line has what the new holder's
row needs. An entry without that is of a call that only wants to be woken, because its request is not plain.

A call whose process has died holds the lock for :data:`GRANT_US` at most.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["GRANT_US", "MOST_IN_LINE", "SEPARATOR", "Entry", "start_of"]

#: Between the fields of an entry. No acquisition has it, and JSON does not.
SEPARATOR: Final = "\x1f"
#: Microseconds that a lock that was transferred is held without a renewal.
GRANT_US: Final = 3_000_000
#: Calls in one line. Further calls poll until there is room: a long row costs more to write.
MOST_IN_LINE: Final = 64


def start_of(acquisition: str, channel: str) -> str:
    """Return the start of a call's entry, which tells it from those of other calls."""
    return f"{acquisition}{SEPARATOR}{channel}{SEPARATOR}"


class Entry(NamedTuple):
    """An entry of the line.

    Args:
        acquisition: The acquisition that is to hold the lock. It also names the call.
        channel: The channel on which the process of the call listens.
        alive_us: The time from which the call does not wait any more.
        ttl_ms: Milliseconds that the lock is to be held, as text; "" if the call only wants to be woken.
        identity: The digest of the call's message, or "".
        holder: The column ``holder`` of a row that this acquisition holds.
    """

    acquisition: str
    channel: str
    alive_us: str
    ttl_ms: str = ""
    identity: str = ""
    holder: str = ""

    @classmethod
    def of(cls, text: str) -> Entry:
        return cls(*text.split(SEPARATOR))

    @property
    def text(self) -> str:
        return SEPARATOR.join(self)

    def to_wake(self) -> Entry:
        """Return the entry of a call that a release wakes, and does not transfer the lock to."""
        return self._replace(ttl_ms="", identity="", holder="")
