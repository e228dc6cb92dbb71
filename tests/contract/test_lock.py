"""`Lock` and `lock_for` in plain threads, against a real server."""

import itertools
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import redis
from celery import Celery
from typing_extensions import Self

from celery_dlock import InvalidLockOptions, Lock, LockLost, singleton_task
from celery_dlock.errors import NotHeld
from celery_dlock.keys.key_spec import shared_name
from celery_dlock.runtime import Runtime
from celery_dlock.store.redis.keys import LockKeys
from tests.contract.conftest import MakeApp
from tests.contract.helpers import commands_seen

KEYS = LockKeys.of("dlock", shared_name("x"))


class Other:
    """Another thread, and so another owner: it takes the lock, and gives it back when told."""

    def __init__(self, lock: Lock) -> None:
        self.lock = lock
        self.has = threading.Event()
        self.go = threading.Event()
        self.left_at = 0.0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self.has.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._thread.join(5)

    def leave(self) -> None:
        self.go.set()

    def _run(self) -> None:
        with self.lock:
            self.has.set()
            self.go.wait(30)
            self.left_at = time.monotonic()


def in_thread(call: Callable[[], object]) -> object:
    """Return the result of ``call`` in a thread of its own; the type of an exception if it raises."""
    got: list[object] = []

    def run() -> None:
        try:
            got.append(call())
        except Exception as error:  # noqa: BLE001  # the test compares it
            got.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return got[0]


# Who holds


@pytest.mark.core
def test_two_threads_are_two_owners_also_of_one_lock_object(app: Celery) -> None:
    lock = Lock("x", app=app)
    with lock:
        assert in_thread(lambda: lock.acquire(blocking=False)) is False
        assert in_thread(lambda: lock.lease) is None
        assert in_thread(lock.release) is NotHeld
        assert lock.locked()
    assert not lock.locked()
    assert in_thread(lambda: lock.acquire(blocking=False)) is True


@pytest.mark.invariant("owner-is-one-delivery")
@pytest.mark.core
def test_an_owner_that_holds_it_enters_again_and_the_outermost_leaving_frees_it(
    app: Celery, client: redis.Redis
) -> None:
    lock, same = Lock("x", app=app), Lock("x", app=app)
    with lock:
        lease = lock.lease
        assert lease
        with same, lock:
            assert same.lease is lease
            assert lease.hold_count == 3
            assert client.hmget(KEYS.lock, "count", "token") == ["3", str(lease.token)]
        assert client.hget(KEYS.lock, "count") == "1"
        assert lease.held
    assert not client.exists(KEYS.lock)
    assert (lock.lease, lease.held, lease.remaining()) == (None, False, 0)


@pytest.mark.core
def test_lock_that_is_not_held_cannot_be_released(app: Celery, client: redis.Redis) -> None:
    lock = Lock("x", app=app)
    with pytest.raises(NotHeld):
        lock.release()
    with Other(Lock("x", app=app)):
        with pytest.raises(NotHeld):
            lock.release()
        assert client.exists(KEYS.lock)
    lock.acquire()
    lock.release()
    with pytest.raises(NotHeld):
        lock.release()


def test_holder_shows_process_token_and_hold_count(app: Celery) -> None:
    lock = Lock("x", app=app, ttl=20)
    assert lock.holder() is None
    with lock, lock:
        holder = lock.holder()
        assert holder
        assert lock.lease
        assert (holder.token, holder.owner, holder.hold_count) == (lock.lease.token, lock.lease.owner, 2)
        assert (holder.task, holder.task_id) == (None, None)
        assert 15 < holder.expires_in <= 20
        assert str(holder).startswith(f"a Lock in process {holder.pid} on ")


@pytest.mark.invariant("owner-is-one-delivery")
@pytest.mark.core
def test_a_lock_that_was_lost_says_so_when_it_is_left_and_cannot_be_entered_again(
    app: Celery, client: redis.Redis
) -> None:
    lock = Lock("x", app=app)
    lock.__enter__()
    lease = lock.lease
    assert lease
    client.delete(KEYS.lock)
    for late in (lock.acquire, lease.ensure, lambda: lock.__exit__(None, None, None)):
        with pytest.raises(LockLost):
            late()
    assert lock.acquire(blocking=False)
    lock.release()


def test_the_error_of_the_body_is_not_hidden_by_a_lost_lock(app: Celery, client: redis.Redis) -> None:
    def body() -> None:
        with Lock("x", app=app):
            client.delete(KEYS.lock)
            raise KeyError

    with pytest.raises(KeyError):
        body()


# Waiting


@pytest.mark.core
def test_a_waiter_is_woken_by_the_release_long_before_its_poll(app: Celery) -> None:
    took = []
    for _ in range(5):
        with Other(Lock("x", app=app)) as other:
            timer = threading.Timer(0.15, other.leave)
            timer.start()
            mine = Lock("x", app=app)
            assert mine.acquire(timeout=10)
            took.append(time.monotonic() - other.left_at)
            mine.release()
    assert median(took) < 0.2, took
    assert max(took) < 1.5, took


@pytest.mark.core
def test_acquire_waits_for_its_timeout_and_no_longer(app: Celery) -> None:
    mine = Lock("x", app=app)
    with Other(Lock("x", app=app)):
        for blocking, timeout, least, most in [(False, None, 0, 0.3), (True, 0, 0, 0.3), (True, 0.4, 0.4, 0.9)]:
            started = time.monotonic()
            assert mine.acquire(blocking, timeout) is False
            assert least <= time.monotonic() - started < most
        assert mine.lease is None


@pytest.mark.parametrize(("blocking", "timeout"), [(True, -1), (False, 1), (False, 0)])
def test_a_timeout_that_means_nothing_is_refused(app: Celery, blocking: bool, timeout: float) -> None:
    with pytest.raises(ValueError, match=rf"Lock\(x:.*\)\.acquire: invalid timeout={timeout}.*: expected"):
        Lock("x", app=app).acquire(blocking, timeout)


@pytest.mark.parametrize("blocking", [5, 0, None, "no"])
def test_a_blocking_that_is_no_bool_is_refused_and_the_time_that_was_meant_is_named(app: Celery, blocking: Any) -> None:
    lock = Lock("x", app=app)
    with pytest.raises(InvalidLockOptions) as refused:
        lock.acquire(blocking)
    assert str(refused.value) == (
        f"Lock({lock.name}).acquire: invalid blocking={blocking!r}: expected True or False; give a time to wait as "
        "timeout="
    )
    assert not lock.locked()


@pytest.mark.core
def test_a_waiter_does_not_spin(app: Celery, client: redis.Redis) -> None:
    mine = Lock("x", app=app)
    with Other(Lock("x", app=app)), commands_seen(client) as seen:
        assert not mine.acquire(timeout=1.2)
    verbs = [words[0] for kind, words in seen if kind != "lua"]
    # Ask, listen, ask again (a release in between would have been missed), and once more at the end.
    assert verbs.count("EVALSHA") + verbs.count("EVAL") <= 4
    assert len(verbs) <= 8, verbs


def test_a_waiter_takes_a_dead_holders_lock_as_soon_as_its_lease_ends(app: Celery, client: redis.Redis) -> None:
    by = {"task": "", "id": "", "process": "node 1"}
    client.hset(KEYS.lock, mapping={"acq": "dead.1", "token": 1, "since": 1, "identity": "", **by})
    client.pexpire(KEYS.lock, 400)
    started = time.monotonic()
    assert Lock("x", app=app).acquire(timeout=5)
    assert 0.3 < time.monotonic() - started < 1


# Who shares


@pytest.mark.core
def test_two_apps_with_different_prefixes_or_stores_share_nothing(redis_url: str, make_app: MakeApp) -> None:
    elsewhere = make_app(redis_url[:-1] + "1")
    ours, prefixed = make_app(), make_app(redis_url, dlock_prefix="theirs")
    locks = [Lock("x", app=app) for app in (ours, prefixed, elsewhere)]
    for number, lock in enumerate(locks):
        assert lock.acquire(blocking=False), number
    for lock, other in itertools.permutations(locks, 2):
        assert lock.lease is not other.lease
    locks[0].release()
    with pytest.raises(NotHeld):
        locks[0].release()
    assert [lock.locked() for lock in locks] == [False, True, True]
    for lock in locks[1:]:
        lock.release()


@pytest.mark.core
def test_two_apps_of_one_store_exclude_each_other(make_app: MakeApp) -> None:
    with Other(Lock("x", app=make_app())):
        assert not Lock("x", app=make_app()).acquire(blocking=False)


@pytest.mark.core
@pytest.mark.parametrize("error", [None, ValueError])
def test_locks_of_another_app_that_a_body_leaves_held_are_released_at_its_store(
    redis_url: str, make_app: MakeApp, error: type[Exception] | None
) -> None:
    """Also the lock of the same name, and the locks of both apps in any order."""
    app, other = make_app(), make_app(redis_url[:-1] + "1")
    lost: list[Any] = []
    for each in (app, other):
        Runtime.of(each).listeners.add(lost.append, lambda kind: kind == "lost")
    left = [Lock(name, app=each) for name, each in (("x", other), ("y", app), ("x", app), ("z", other))]

    @singleton_task(app=app, shared=False, name="leaving")
    def leaving() -> list[bool]:
        for lock in left:
            lock.acquire()
        left[0].acquire()  # a second entry
        if error is not None:
            raise error
        return [lock.locked() for lock in left]

    result = leaving.apply()
    assert result.result == [True] * len(left) if error is None else isinstance(result.result, error)
    assert [lock.locked() for lock in left] == [False] * len(left)
    assert not lost


@pytest.mark.core
def test_a_shared_task_key_and_a_lock_of_that_text_exclude_each_other(app: Celery) -> None:
    @singleton_task(app=app, shared=False, name="pay", key="account:{number}", scope="shared")
    def pay(number: int) -> None: ...

    @singleton_task(app=app, shared=False, name="close", key="account:{number}")
    def close(number: int) -> None: ...

    with Other(pay.lock_for(5)):
        assert not Lock("account:5", app=app).acquire(blocking=False)
        assert not pay.lock_for(number=5).acquire(blocking=False)
        for free in (Lock("account:6", app=app), pay.lock_for(6), close.lock_for(5)):
            assert free.acquire(blocking=False)
            free.release()
    with Lock("account:5", app=app):
        assert pay.lock_for(5).lease is not None  # the same thread: it would re-enter
        assert in_thread(lambda: pay.lock_for(5).acquire(blocking=False)) is False


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
@pytest.mark.parametrize("limit", [1, 3, 5])
def test_nested_task_of_another_limit_enters_the_seat_of_its_caller(app: Celery, limit: int) -> None:
    """On another seat it would wait for its own caller when all seats are held."""

    options = {"app": app, "shared": False, "bind": True, "key": "gpu:{n}", "scope": "shared", "on_conflict": "raise"}

    @singleton_task(name="inner", limit=limit, **options)
    def inner(self: Any, n: int) -> tuple[int, int, int]:
        return n, self.lease.seat, self.lease.hold_count

    @singleton_task(name="outer", limit=3, **options)
    def outer(self: Any, n: int) -> Any:
        return self.lease.seat, inner.apply((n,)).get(), inner.lock_for(n).acquire(blocking=False)

    with Other(outer.lock_for(7)):  # seat 0
        assert outer.apply((7,)).get() == (1, (7, 1, 2), True)
    assert not outer.lock_for(7).locked()


def test_a_ttl_is_the_locks_own_else_the_apps(make_app: MakeApp, client: redis.Redis) -> None:
    with Lock("x", app=make_app(dlock_ttl=100)):
        assert 95_000 < client.pttl(KEYS.lock) <= 100_000
    with Lock("x", app=make_app(dlock_ttl=100), ttl=7):
        assert 5_000 < client.pttl(KEYS.lock) <= 7_000


@pytest.mark.parametrize("name", ["", None, 5, b"x"])
def test_a_name_that_is_no_text_is_refused(app: Celery, name: Any) -> None:
    with pytest.raises(InvalidLockOptions, match="non-empty str"):
        Lock(name, app=app)


def test_app_that_is_no_celery_app_is_refused() -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        Lock("x", app=5)  # type: ignore[arg-type]  # what a caller may pass
    assert str(refused.value) == "Lock(x): invalid app=5: expected a Celery app, or none for the current app"


@pytest.mark.parametrize("ttl", [0, 0.9, -1, True, "30", float("nan")])
def test_a_ttl_below_one_second_is_refused(app: Celery, ttl: Any) -> None:
    with pytest.raises(InvalidLockOptions, match=r"ttl=.*at least 1|ttl=.*from 1 to"):
        Lock("x", app=app, ttl=ttl)
