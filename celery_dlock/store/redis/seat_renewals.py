"""Renewals of leases, also of those on seats (``limit``) while a Cluster moves their slot to another node.

The script of a seat looks at all seats of its name. While their slot migrates, some seats may be on one node and some
on the other. The Cluster then answers TRYAGAIN until the move ends, which may take longer than the ttl. So the renewal
is sent for the key of each seat by itself, because one key is always on one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ...errors import StoreNotReady, StoreUnavailable
from ...keys.lock_name import ONE_LOCK, LockName, one_seat
from ...options.values import MAX_LIMIT
from ..model import Renewal
from . import commands
from .commands import Command
from .keys import LockKeys
from .topology import Pipeline, Topology

__all__ = ["send_renewals"]

_NOT_HELD: Final = 0
_RENEWED: Final = 1


def send_renewals(
    topology: Topology, pipeline: Pipeline, prefix: str, renewals: Sequence[Renewal], within: float | None
) -> list[Any]:
    """Return the reply to each renewal, or the error instead of it.

    Args:
        topology: Sends the commands.
        pipeline: Writes them, and waits for their confirmations.
        prefix: The prefix of all keys.
        renewals: The renewals.
        within: Seconds to wait, as for :meth:`Topology.each`.

    Raises:
        StoreUnavailable: No lease was renewed.
    """
    # Not from the cache of keys: a process may hold more leases than the cache has entries.
    locks = [LockKeys.lock_of(prefix, one.name) for one in renewals]
    calls = [
        (lock, commands.renew(lock, one) if one.name.seats == ONE_LOCK else _of_seat(prefix, one))
        for lock, one in zip(locks, renewals, strict=True)
    ]
    try:
        answers = topology.each(pipeline, calls, within, awaits_moves=False)
    except StoreNotReady as error:
        answers = [error] * len(renewals)
    if StoreNotReady in map(type, answers):
        answers = [
            _renew_each_seat(topology, pipeline, prefix, one, answer, within)
            if _half_moved(one.name, answer)
            else answer
            for one, answer in zip(renewals, answers, strict=True)
        ]
        if all(type(answer) is StoreNotReady for answer in answers):
            raise answers[0]
    return answers


def _of_seat(prefix: str, renewal: Renewal) -> Command:
    return commands.renew_seat(LockKeys.of(prefix, renewal.name), renewal)


def _half_moved(name: LockName, answer: Any) -> bool:
    """Return whether the seats of a name may be on two nodes."""
    return name.seats != ONE_LOCK and type(answer) is StoreNotReady and "TRYAGAIN" in str(answer)


def _renew_each_seat(
    topology: Topology, pipeline: Pipeline, prefix: str, renewal: Renewal, error: StoreNotReady, within: float | None
) -> Any:
    """Return the reply about the seat that the acquisition holds, or the error if it is unknown which seat it holds."""
    name, limit = renewal.name, max(1, renewal.name.seats)
    # A worker with a larger limit may have given this lease a seat above the limit of its own worker.
    for seats in (range(limit), range(limit, MAX_LIMIT)):
        locks = [LockKeys.lock_of(prefix, one_seat(name, seat) if seat else name) for seat in seats]
        calls = [(lock, commands.renew(lock, renewal)) for lock in locks]
        try:
            answers = topology.each(pipeline, calls, within)
        except StoreUnavailable:
            return error
        if _RENEWED in answers:
            return _RENEWED
        if any(answer != _NOT_HELD for answer in answers):
            return error
    return _NOT_HELD
