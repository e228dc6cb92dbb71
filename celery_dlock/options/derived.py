"""Values about options that other packages share."""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["SKEW", "StopReason", "tick_mark_ttl"]

#: Seconds by which any two clocks of beats, workers and the store may differ.
SKEW: Final = 60.0
#: Seconds added to the skew, because a mark is written a little after its body has begun.
_MARGIN: Final = 60.0

#: Why a body is to be stopped: its lease is lost, or a newer call replaces it.
StopReason = Literal["lost", "replaced"]


def tick_mark_ttl(misfire_grace: float) -> float:
    """Return the seconds for which a tick's run is remembered, counted from its success.

    A later message of the same tick must find the mark or be a misfire. Otherwise the tick would run twice. Two clocks
    differ by at most the skew. A run starts at ``due - skew`` of its worker's clock at the earliest, because the worker
    refuses an earlier message. By the store's clock that is ``due - 2 skew``, and the mark is written later. A message
    that is no misfire starts at ``due + misfire_grace`` of its worker's clock at the latest: ``due + misfire_grace +
    skew`` by the store's clock. The difference is ``misfire_grace + 3 skew``.
    """
    return misfire_grace + 3 * SKEW + _MARGIN
