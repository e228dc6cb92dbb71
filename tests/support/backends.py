"""The backends of the engine that the tests of stores can run over. A new backend adds its line to :data:`BACKENDS`.

The variable ``DLOCK_TEST_BACKEND`` chooses one: ``make prove-backend BACKEND=memory``.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pytest

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.backend import Backend, Changes, Listed, Session, Wanted
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.memory.backend import MemoryBackend, MemoryClock
from celery_dlock.store.model import Acquired, AcquireRequest, Released, Renewal
from celery_dlock.store.operator import ListCursor
from celery_dlock.store.rules.data import Head, Mark, MarkKind, QueuePart, Timed, Waiter

__all__ = ["BACKEND", "BACKENDS", "CHOSEN", "CheckedBackend", "ProvenBackend", "proven_backend"]


class ProvenBackend(NamedTuple):
    """A backend.

    Args:
        url: Empties the store, and returns its ``dlock_url``.
        make: Returns an empty backend whose time is that of a clock.
    """

    url: Callable[[], str]
    make: Callable[[MemoryClock], Backend]


BACKENDS: Final = {"memory": ProvenBackend(lambda: "memory://", MemoryBackend)}
#: The backend that `make prove-backend` proves; "" without it.
CHOSEN: Final = os.environ.get("DLOCK_TEST_BACKEND", "")
#: The backend of the histories against the scripts, and of the stateful tests.
BACKEND: Final = CHOSEN or "memory"


def proven_backend(clock: MemoryClock) -> Backend:
    """Return an empty backend of the chosen kind. Skip the test if the kind is not in :data:`BACKENDS`."""
    if BACKEND not in BACKENDS:
        pytest.skip(f"{BACKEND} is not in BACKENDS, so this test would prove another backend")
    return BACKENDS[BACKEND].make(clock)


class CheckedBackend:
    """A backend whose answers must be those of a memory backend, to which the same is committed.

    Args:
        backend: The backend.
        memory: The memory backend, with the same clock.
    """

    def __init__(self, backend: Backend, memory: MemoryBackend) -> None:
        self._backend, self._memory = backend, memory
        self._rules = EngineStore(memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    @contextmanager
    def open(self, name: LockName, wanted: Wanted) -> Iterator[Session]:
        with self._backend.open(name, wanted) as session, self._memory.open(name, wanted) as expected:
            yield _CheckedSession(session, expected)

    def cursors(self, listed: Listed, after: ListCursor | None, most: int) -> list[ListCursor]:
        found = self._backend.cursors(listed, after, most)
        if listed in ("dead", "queue"):  # the others may have expired
            assert found == self._memory.cursors(listed, after, most)
        return found

    def due(self, buckets: Sequence[int], most: int, within_us: int) -> list[LockName]:
        found = self._backend.due(buckets, most, within_us)
        assert found == self._memory.due(buckets, most, within_us)
        return found

    # Fast paths: they do what the rules do.

    def acquire_plain(self, name: LockName, acquisition: str, ttl_ms: int, request: AcquireRequest) -> Acquired | None:
        answer = self._backend.acquire_plain(name, acquisition, ttl_ms, request)
        assert answer is None or answer == self._rules.acquire(name, acquisition, ttl_ms, request)
        return answer

    def release_plain(self, name: LockName, acquisition: str, ending: ReleaseRequest) -> Released | None:
        answer = self._backend.release_plain(name, acquisition, ending)
        assert answer is None or answer == self._rules.release(name, acquisition, ending)
        return answer

    def renew_plain(self, renewals: Sequence[Renewal], within: float | None) -> Sequence[bool | None]:
        answers = self._backend.renew_plain(renewals, within)
        for renewal, answer in zip(renewals, answers, strict=True):
            assert answer is None or [answer] == self._rules.renew([renewal])
        return answers


class _CheckedSession:
    def __init__(self, session: Session, expected: Session) -> None:
        self._session, self._expected = session, expected
        self.now, self.next_token = session.now, session.next_token
        self.head = session.head
        assert _living(self.head, self.now) == _living(expected.head, self.now)

    def mark(self, kind: MarkKind, key: str) -> Mark | None:
        return self._same(self._session.mark(kind, key), self._expected.mark(kind, key))

    def _same(self, found: Mark | None, expected: Mark | None) -> Mark | None:
        found, expected = (mark if mark is not None and mark.until > self.now else None for mark in (found, expected))
        assert found == expected
        return found

    def marks(self, kind: MarkKind) -> dict[str, Mark]:
        return self._session.marks(kind)

    def waiter(self, identity: str) -> Waiter | None:
        found = self._session.waiter(identity)
        assert found == self._expected.waiter(identity)
        return found

    def entries(self) -> dict[str, str]:
        found = self._session.entries()
        assert found == self._expected.entries()
        return found

    def first_in(self, part: QueuePart, most: int, low: int | None, high: int | None) -> list[tuple[str, Waiter]]:
        found = self._session.first_in(part, most, low, high)
        assert found == self._expected.first_in(part, most, low, high)
        return found

    def count_before(self, part: QueuePart, score: int, identity: str) -> int:
        found = self._session.count_before(part, score, identity)
        assert found == self._expected.count_before(part, score, identity)
        return found

    def end_guard(self, token: int) -> bool:
        return self._session.end_guard(token)

    def commit(self, changes: Changes) -> None:
        self._session.commit(changes)
        self._expected.commit(changes)


def _living(head: Head, now: int) -> Head:
    """Return the head without what has expired. A backend may round an expiry up to milliseconds."""

    def alive(timed: Timed[Any] | None) -> Any:
        if timed is None or (timed.until is not None and timed.until <= now):
            return None
        return Timed(timed.record, timed.until and -(-timed.until // 1000))

    return replace(
        head,
        locks={seat: lock for seat, lock in head.locks.items() if alive(lock)},
        seats=alive(head.seats),
        claim=alive(head.claim),
        newest_call=alive(head.newest_call),
        replaced=alive(head.replaced),
    )
