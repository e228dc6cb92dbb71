"""A backend whose commits fail: refused, or carried out without a reply."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from celery_dlock.errors import ReplyLost
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import call_again_if_reply_lost
from celery_dlock.store.engine.backend import Backend, Changes, Conflict, Session, Wanted

__all__ = ["Fault", "FaultyBackend", "Resending", "conflict", "lost_reply", "one_in_three"]

#: It does what a commit that fails does.
Fault = Callable[[Session, Changes], None]


def conflict(_session: Session, _changes: Changes) -> None:
    """Refuse a commit."""
    raise Conflict


def lost_reply(session: Session, changes: Changes) -> None:
    """Commit, and lose the reply."""
    session.commit(changes)
    raise ReplyLost("the test lost the reply")


def one_in_three(seed: int) -> Callable[[], bool]:
    """Return a function that says yes at random. After a yes it says no: a verb is not sent a third time."""
    rng, last = random.Random(seed), [False]

    def fails() -> bool:
        last[0] = not last[0] and rng.random() < 0.5
        return last[0]

    return fails


class FaultyBackend:
    """A backend of which some commits fail.

    Args:
        backend: The backend.
        fails: Returns whether the next commit fails.
        fault: Does what the failing commit does.
        timeout: How long the engine runs a rule again, in place of the backend's own timeout.
    """

    def __init__(self, backend: Backend, fails: Callable[[], bool], fault: Fault, timeout: float | None = None) -> None:
        self._backend, self._fails, self._fault = backend, fails, fault
        self.timeout = backend.timeout if timeout is None else timeout
        #: How many commits have failed.
        self.faults = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    @contextmanager
    def open(self, name: LockName, wanted: Wanted) -> Iterator[Session]:
        with self._backend.open(name, wanted) as session:
            yield _FaultySession(self, session)

    def commit(self, session: Session, changes: Changes) -> None:
        if self._fails():
            self.faults += 1
            self._fault(session, changes)
        else:
            session.commit(changes)


class _FaultySession:
    def __init__(self, backend: FaultyBackend, session: Session) -> None:
        self._backend, self._session = backend, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def commit(self, changes: Changes) -> None:
        self._backend.commit(self._session, changes)


class Resending:
    """A store whose caller sends an acquire again if its reply is lost."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        return partial(call_again_if_reply_lost, verb) if name == "acquire" else verb
