"""Guard a transaction of the user with a lease, and let it settle the run."""

from __future__ import annotations

from ..base import ReleaseRequest
from .data import Guard
from .records import Records
from .runs import settle_run

__all__ = ["guard"]


def guard(records: Records, acquisition: str, settles: ReleaseRequest | None = None) -> Guard | None:
    """Make the guard of an acquisition. Return None if the acquisition does not hold the lock.

    Args:
        records: The records.
        acquisition: The acquisition.
        settles: The end of a run that succeeds, if its run mark commits with the transaction.
    """
    for seat in records.taken_seats():
        its = records.seat(seat)
        lock = its.lock()
        if lock is not None and lock.acquisition == acquisition:
            its.guard(lock.token)
            return Guard(lock.token, settles and settle_run(its, acquisition, settles))
    return None
