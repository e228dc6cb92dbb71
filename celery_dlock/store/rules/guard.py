"""Guard a transaction of the user with a lease."""

from __future__ import annotations

from .records import Records

__all__ = ["guard"]


def guard(records: Records, acquisition: str) -> int | None:
    """Make the guard of an acquisition. Return its fencing token; None if the acquisition does not hold the lock."""
    for seat in records.taken_seats():
        its = records.seat(seat)
        lock = its.lock()
        if lock is not None and lock.acquisition == acquisition:
            its.guard(lock.token)
            return lock.token
    return None
