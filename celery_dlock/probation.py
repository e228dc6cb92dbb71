"""A server that may have lost leases grants nothing new until those that it may have lost are over.

After a failover, a restart without its data or a FLUSHALL a server cannot know who believes to hold a lock. Leases that
it has are renewed and released meanwhile, and everything is read. (Chubby's lock-delay, Redlock's delayed restart.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .errors import OnProbation
from .wire import ErrorReply, Wire

__all__ = ["Probation", "on_probation", "sure_run"]

_ASKED = b"*1\r\n$4\r\nINFO\r\n", b"*3\r\n$6\r\nCONFIG\r\n$3\r\nGET\r\n$11\r\nappendfsync\r\n"


class Probation(NamedTuple):
    """How a store's servers are put on probation.

    Args:
        delay: Seconds that it lasts: no lease may live longer.
        setting: The setting that says so, for errors.
        trusts_disk: A server that restarts with all that it ever confirmed, which only its own append-only file can
            promise, grants at once. Only where no replica may be promoted: that one has the primary's marker, too.
    """

    delay: float
    setting: str = "dlock_failover_quarantine"
    trusts_disk: bool = False

    @property
    def delay_ms(self) -> str:
        return str(round(self.delay * 1000))


def on_probation(left_ms: int, probation: Probation) -> OnProbation:
    """Why nothing is granted."""
    return OnProbation(
        "the lock store was started, emptied or promoted to primary a moment ago: it grants nothing new for another "
        f"{math.ceil(left_ms / 100) / 10:.1f} s, until the leases that it may have lost are over ({probation.setting})",
        left_ms / 1000,
    )


def sure_run(wire: Wire) -> str:
    """The run_id of a server that loses nothing in a restart, or "" where that is not sure."""
    info, setting = (wire.ask(words) for words in _ASKED)
    if type(info) is ErrorReply or type(setting) is ErrorReply or setting[1:] != [b"always"]:
        return ""  # it may be forbidden to ask
    facts = dict(line.split(":", 1) for line in bytes(info).decode("utf-8", "replace").splitlines() if ":" in line)
    return facts.get("run_id", "") if facts.get("aof_enabled") == "1" else ""
