"""Exceptions travel: between processes by pickle, through result backends by JSON."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import Backend
from celery.exceptions import TaskRevokedError

import celery_dlock
from celery_dlock import CallSkipped, Replaced, errors
from celery_dlock.errors import (
    DLockError,
    InvalidLockOptions,
    LockHeld,
    LockKeyError,
    NameUsed,
    ReplyLost,
    StoreUnavailable,
    UnknownOutcome,
)
from celery_dlock.task.outcomes import Skipped

EVERY: list[Exception] = [
    *(getattr(errors, name)("what happened") for name in errors.__all__),
    LockHeld("held by a[id] on n", "name:1", "id", "n", 12.5),
    NameUsed("already done by a[id] on n", "name:1", "id", "n", 12.5),
    UnknownOutcome("outcome unknown: a[id] on n started", "name:1", "id", "n", 12.5),
    CallSkipped("held by a[id] on n", "name:1", "id", "n", 12.5),
    CallSkipped("was due 60 s ago (misfire_grace)", "name:1"),
    LockHeld("held by a Lock in process 5 on n", "name:1", None, "n", 12.5),
    Replaced("replaced by id", "name:1", "id"),
    Replaced(),
    DLockError(),
    LockKeyError("ä €"),
]


def state(error: BaseException) -> tuple[Any, ...]:
    return (type(error), error.args, str(error), vars(error))


@pytest.mark.parametrize("error", EVERY, ids=repr)
def test_every_exception_survives_pickle_and_copy(error: Exception) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert state(pickle.loads(pickle.dumps(error, protocol))) == state(error)
    assert state(copy.copy(error)) == state(error)


@pytest.mark.core
@pytest.mark.parametrize("error", EVERY, ids=repr)
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_every_exception_survives_a_result_backend(error: Exception, serializer: str) -> None:
    app = Celery("a", set_as_current=False)
    backend: Any = Backend(app, serializer=serializer, accept=[serializer])
    stored = backend.prepare_exception(error)
    if serializer == "json":
        stored = json.loads(json.dumps(stored))
    assert state(backend.exception_to_python(stored)) == state(error)


def test_every_exception_is_one_of_ours() -> None:
    """A user catches them all by the root."""
    assert all(issubclass(getattr(errors, name), DLockError) for name in errors.__all__)
    assert issubclass(ReplyLost, StoreUnavailable)
    for wrong_value in (InvalidLockOptions, LockKeyError):
        assert issubclass(wrong_value, ValueError)


def test_a_held_lock_tells_who_holds_it_as_attributes_and_people_only_the_message() -> None:
    error = LockHeld("held by a[id] on n", "name:1", "id", "n", 12.5)
    assert (error.name, error.task_id, error.node, error.since) == ("name:1", "id", "n", 12.5)
    assert str(error) == error.message == "held by a[id] on n"


def test_skipped_call_is_told_from_an_operators_revocation_by_its_class() -> None:
    error = CallSkipped("held by a[id] on n", "name:1", "id", "n", 12.5)
    assert isinstance(error, TaskRevokedError)
    assert isinstance(error, DLockError)
    assert (error.name, error.task_id, error.node, error.since) == ("name:1", "id", "n", 12.5)
    assert str(error) == "held by a[id] on n"


def test_skipped_call_is_stored_under_its_public_path() -> None:
    """Result backends keep the path, and processes of other versions look it up there."""
    assert (CallSkipped.__module__, CallSkipped.__qualname__) == ("celery_dlock", "CallSkipped")


def test_end_of_a_skipped_trace_survives_pickle_with_its_error() -> None:
    """The pool child sends it to the main process."""
    error = CallSkipped("held by a[id] on n", "name:1", "id", "n", 12.5)
    copied = pickle.loads(pickle.dumps(Skipped(error)))
    assert (type(copied), state(copied.error), str(copied)) == (Skipped, state(error), str(error))


def test_every_public_name_is_there() -> None:
    assert set(celery_dlock.__all__) == {
        "CallSkipped", "DLockError", "GuardRefused", "InvalidLockOptions", "InvalidTick", "Lease", "Lock", "LockHeld",
        "LockLost", "LockOptions", "NameUsed", "Replaced", "SingletonTask", "StoreUnavailable", "UnknownOutcome",
        "signals", "singleton_task",
    }  # fmt: skip
    assert all(hasattr(celery_dlock, name) for name in celery_dlock.__all__)
