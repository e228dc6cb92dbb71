"""Never run, only type-checked: what a user writes, and mistakes that a checker must report.

Each mistake carries the ignore of the error that it must give. Under ``warn_unused_ignores`` an ignore that nothing
needs is an error itself, so a mistake that is no longer reported fails `make types` (and test_typing.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery import Celery
from typing_extensions import assert_type

from celery_dlock import Lease, Lock, LockHeld, LockOptions, SingletonTask, singleton_task
from celery_dlock.locking.lease import BypassLease, NullLease
from celery_dlock.store.holder_model import Holder

app = Celery("typed")


@singleton_task
def bare(number: int, text: str = "") -> float:
    return number / len(text)


@singleton_task(app=app, key="account:{number}", scope="shared", ttl=timedelta(minutes=1), on_conflict="retry")
def with_options(number: int) -> str:
    return str(number)


@singleton_task(bind=True, ttl=30, acks_late=True)
def bound(self: SingletonTask, user_id: int) -> bool:
    assert_type(self.lease, Lease | BypassLease | NullLease)
    return self.lease.held and user_id > 0


@app.task(base=SingletonTask, lock_options=LockOptions(key=["account_id"]))
def plain(account_id: int) -> None: ...


# A task's own signature is kept

assert_type(bare(1), float)
assert_type(bare(1, text="x"), float)
assert_type(with_options(1), str)
assert_type(bound(5), bool)  # without self
assert_type(bare.lock_name(1), str)
assert_type(bare.lock_for(1, "x"), Lock)
assert_type(bare.lease, Lease | BypassLease | NullLease)
assert_type(bare.lease.token, int | None)
assert_type(bare.name, str)
assert_type(bare.lock_options, LockOptions)
bare.delay(1)
bare.delay(number=1, text="x")
bound.delay(5)

bare("x")  # type: ignore[arg-type]
bare.delay("x")  # type: ignore[arg-type]
bare.delay()  # type: ignore[call-arg]
bare.delay(1, "x", 2)  # type: ignore[call-arg]
bare.delay(1, txt="x")  # type: ignore[call-arg]
bare.lock_name("x")  # type: ignore[arg-type]
bare.lock_for()  # type: ignore[call-arg]
with_options.delay("x")  # type: ignore[arg-type]
bound("x")  # type: ignore[arg-type]
bound.delay("x")  # type: ignore[arg-type]
wrong: str = bare(1)  # type: ignore[assignment]

# Celery's own methods stay open

result: Any = bare.apply_async((1,), {"text": "x"}, countdown=5)
again: Any = bare.s(1) | bound.si(5)
eager: Any = bare.apply((1,)).get()
retries: Any = bare.max_retries

# Locks

lock = Lock("x", app=app, ttl=5)
with lock as entered:
    assert_type(entered, Lock)
    assert_type(lock.lease, Lease | NullLease | None)
assert_type(lock.acquire(blocking=False), bool)
assert_type(lock.acquire(timeout=2.5), bool)
assert_type(lock.holder(), Holder | None)
assert_type(lock.locked(), bool)
Lock(5)  # type: ignore[arg-type]
lock.acquire(timeout="2")  # type: ignore[arg-type]

# Options and errors

LockOptions(scope="global")  # type: ignore[arg-type]
LockOptions(on_conflikt="skip")  # type: ignore[call-arg]
LockOptions("sms:{id}")  # type: ignore[call-arg]
singleton_task(app="x")  # type: ignore[call-overload]
try:
    bare.delay(1)
except LockHeld as error:
    assert_type(error.task_id, str | None)
