"""``lease.settle(connection)``: the run mark (``once_per``) commits with the user's rows, or not at all."""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from celery import Celery

from celery_dlock import Lock, SingletonTask, singleton_task
from celery_dlock.errors import DLockError, GuardRefused
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.model import Acquired, AcquireRequest, Duplicate, Identity, Refusal, Unknown, Used
from celery_dlock.store.sql.session import SQLSession
from tests.contract.helpers import NAME, TTL, ending_of, request_of
from tests.contract.sql_helpers import a_store, connected_user, server_url
from tests.support.polling import eventually

pytestmark = [pytest.mark.servers, pytest.mark.invariant("settled-run-is-used-with-its-rows")]

WINDOW = 3_600_000
RETRY = Identity("a", 1)


@pytest.fixture
def store(sql_url: str) -> Iterator[EngineStore]:
    with closing(a_store(sql_url)) as made:
        yield made


@pytest.fixture
def user(sql_url: str) -> Iterator[Any]:
    """A connection of the user, which may do everything."""
    with connected_user(server_url(sql_url)) as connection:
        yield connection


def once(task_id: str, **facts: Any) -> AcquireRequest:
    return request_of(task_id, once=True, run_mark_ms=WINDOW, **facts)


def success(task_id: str) -> ReleaseRequest:
    return ending_of(task_id, used_ms=WINDOW, once=True, window_ms=WINDOW, seed="7")


def take(store: EngineStore, task_id: str, **facts: Any) -> Acquired:
    answer = store.acquire(NAME, f"{task_id}.1", TTL, once(task_id, **facts))
    assert isinstance(answer, Acquired), answer
    return answer


def settle(store: EngineStore, task_id: str, connection: Any) -> bool:
    return store.guard(NAME, f"{task_id}.1", connection, success(task_id))


def next_call(store: EngineStore, **facts: Any) -> Acquired | Refusal:
    return store.acquire(NAME, f"n.{uuid.uuid4().hex}", TTL, once("n", **facts))


def state(store: EngineStore) -> str | None:
    found = store.last_run(NAME)
    return found and found.state


def lose_process(store: EngineStore, task_id: str) -> None:
    """Do what the watchdog does for a pool child that has died."""
    store.release(NAME, f"{task_id}.1", ReleaseRequest(outcome_unknown=True))


def commit_at_the_last_moment(monkeypatch: pytest.MonkeyPatch, connection: Any) -> None:
    """Commit when another call, which has read the run mark, asks whether the transaction has ended."""
    ask: Callable[..., bool] = SQLSession.end_guard

    def end_guard(session: SQLSession, token: int) -> bool:
        if not ask(session, token):
            connection.execute("COMMIT")
        return ask(session, token)

    monkeypatch.setattr(SQLSession, "end_guard", end_guard)


def test_run_is_used_from_the_commit_on(store: EngineStore, user: Any) -> None:
    take(store, "a")
    with user.transaction():
        assert settle(store, "a", user)
        assert state(store) is None
    assert state(store) == "used"
    assert isinstance(next_call(store), Used)


def test_process_that_dies_after_the_commit_leaves_a_used_name(store: EngineStore, user: Any) -> None:
    take(store, "a")
    with user.transaction():
        assert settle(store, "a", user)
    lose_process(store, "a")
    assert isinstance(next_call(store), Used)
    assert [run.state for run in store.unsettled_runs()] == []


def test_message_is_a_duplicate_when_its_settled_run_has_released_the_lock(store: EngineStore, user: Any) -> None:
    """Until then, a redelivered message of the run must store an end of its own."""
    again = request_of("a", once=True, redelivered=True)
    take(store, "a")
    with user.transaction():
        assert settle(store, "a", user)
    lose_process(store, "a")
    answer = store.acquire(NAME, "a.2", TTL, again)
    assert isinstance(answer, Used)
    assert (answer.same_message, answer.result_stored) == (True, False)
    store.release(NAME, "a.1", success("a"))
    assert isinstance(store.acquire(NAME, "a.3", TTL, again), Duplicate)


def test_failure_after_the_commit_leaves_a_used_name(store: EngineStore, user: Any) -> None:
    take(store, "a")
    with user.transaction():
        assert settle(store, "a", user)
    store.release(NAME, "a.1", success("a")._replace(used_ms=0))
    assert isinstance(next_call(store), Used)


@pytest.mark.parametrize("hold_if_unknown", [True, False])
def test_process_that_dies_before_the_commit_leaves_a_free_name(
    store: EngineStore, user: Any, hold_if_unknown: bool
) -> None:
    take(store, "a")
    with user.transaction(force_rollback=True):
        assert settle(store, "a", user)
        lose_process(store, "a")
    answer = eventually(
        lambda: found if isinstance(found := next_call(store, hold_if_unknown=hold_if_unknown), Acquired) else None
    )
    assert answer is not None
    assert not answer.after_crash


@pytest.mark.parametrize("action", ["resolve", "forget"])
def test_operator_does_not_overwrite_a_run_that_a_transaction_settles_meanwhile(
    store: EngineStore, user: Any, sql_url: str, action: str
) -> None:
    """The operator has read an unknown outcome, and waits for the row that the transaction writes."""
    take(store, "x")
    lose_process(store, "x")
    take(store, "a")
    with closing(a_store(sql_url)) as operator, ThreadPoolExecutor(1) as thread, user.transaction():
        assert settle(store, "a", user)
        unknown = operator.last_run(NAME)
        assert unknown is not None
        if action == "resolve":
            waiting = thread.submit(operator.resolve_run, NAME, sent=False, window_ms=WINDOW, mark=unknown.mark)
        else:
            waiting = thread.submit(operator.forget_run, NAME, mark=unknown.mark)
        eventually(lambda: waits_for_a_row(sql_url))
        user.execute("COMMIT")
        assert waiting.result(20) is False
        assert state(store) == "used"


def waits_for_a_row(sql_url: str) -> bool:
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    if not sql_url.startswith("postgresql"):
        waiting = "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    with connected_user(server_url(sql_url)) as administrator:
        return bool(administrator.execute(waiting).fetchall())


@pytest.mark.parametrize("reason", ["server", "autocommit"])
def test_settle_that_is_refused_leaves_the_outcome_of_a_later_crash_unknown(
    store: EngineStore, user: Any, reason: str
) -> None:
    take(store, "a")
    if reason == "server":
        user.execute("CREATE TABLE IF NOT EXISTS users_table (id int)")
        with user.transaction():
            user.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            user.execute("SELECT * FROM users_table")
            with pytest.raises(GuardRefused):
                settle(store, "a", user)
    else:
        with pytest.raises(GuardRefused):
            settle(store, "a", user)
    lose_process(store, "a")
    assert isinstance(next_call(store, hold_if_unknown=True), Unknown)


def test_process_that_dies_before_it_settles_leaves_an_unknown_outcome(store: EngineStore, user: Any) -> None:
    """The body may have done more than this transaction."""
    take(store, "a")
    with user.transaction():
        assert store.guard(NAME, "a.1", user)
    lose_process(store, "a")
    assert isinstance(next_call(store, hold_if_unknown=True), Unknown)


def test_rollback_keeps_the_unknown_outcome_of_an_earlier_run(store: EngineStore, user: Any) -> None:
    take(store, "a")
    lose_process(store, "a")
    assert take(store, "b").after_crash
    with user.transaction(force_rollback=True):
        assert settle(store, "b", user)
    store.release(NAME, "b.1", success("b")._replace(used_ms=0))
    found = eventually(lambda: store.last_run(NAME))
    assert found is not None
    assert (found.state, found.task_id) == ("unknown", "a")


def test_call_that_read_the_mark_before_the_commit_does_not_run(
    store: EngineStore, user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(store, "a")
    user.execute("BEGIN")
    assert settle(store, "a", user)
    lose_process(store, "a")
    commit_at_the_last_moment(monkeypatch, user)
    assert isinstance(next_call(store), Used)


def test_retry_that_read_the_mark_before_the_commit_does_not_run(
    store: EngineStore, user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry may take the lock that is reserved for it (``keep_on_retry``) without a look at the guard."""
    take(store, "a")
    user.execute("BEGIN")
    assert settle(store, "a", user)
    ending = success("a")._replace(used_ms=0, once=False, reserved_for=RETRY.digest, reserved_ms=TTL)
    store.release(NAME, "a.1", ending)
    commit_at_the_last_moment(monkeypatch, user)
    assert isinstance(store.acquire(NAME, "a.2", TTL, once("a")._replace(identity=RETRY)), Used)


def test_name_that_was_forgotten_during_the_run_is_used_after_its_commit(store: EngineStore, user: Any) -> None:
    take(store, "a")
    store.forget_run(NAME)
    with user.transaction():
        assert settle(store, "a", user)
    assert state(store) == "used"


def test_release_after_the_commit_keeps_the_key_of_the_run(store: EngineStore, user: Any) -> None:
    take(store, "a")
    with user.transaction():
        assert settle(store, "a", user)
    settled = store.last_run(NAME)
    store.release(NAME, "a.1", success("a"))
    released = store.last_run(NAME)
    assert settled is not None
    assert released is not None
    assert settled.idempotency_key == released.idempotency_key


def test_lost_lease_settles_nothing(store: EngineStore, user: Any) -> None:
    take(store, "a")
    lose_process(store, "a")
    with user.transaction():
        assert not settle(store, "a", user)
    assert state(store) == "unknown"


def test_call_without_a_run_mark_is_guarded_only(store: EngineStore, user: Any) -> None:
    """``once_per="tick"``, called by hand: the call serves no tick."""
    assert isinstance(store.acquire(NAME, "a.1", TTL, request_of("a")), Acquired)
    with user.transaction():
        assert store.guard(NAME, "a.1", user, ending_of("a"))
    assert state(store) is None


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_settling_works_on_every_isolation_level(store: EngineStore, user: Any, level: str) -> None:
    take(store, "a")
    with user.transaction():
        user.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        assert settle(store, "a", user)
    assert state(store) == "used"


@pytest.mark.parametrize("sql_url", ["postgresql"], indirect=True)
def test_settling_is_refused_if_the_snapshot_is_older_than_the_run_mark(store: EngineStore, user: Any) -> None:
    """MariaDB writes the newest row, whatever the snapshot has."""
    take(store, "a")
    with user.transaction(force_rollback=True):
        user.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert store.guard(NAME, "a.1", user)
        with pytest.raises(GuardRefused, match="before any other statement"):
            settle(store, "a", user)


def test_message_of_a_settled_run_that_failed_is_a_duplicate(store: EngineStore, user: Any) -> None:
    """Its failure is stored, and no end of a copy may replace that."""
    take(store, "a")
    with user.transaction():
        assert settle(store, "a", user)
    store.release(NAME, "a.1", success("a")._replace(used_ms=0, final=True))
    answer = store.acquire(NAME, "a.2", TTL, once("a", redelivered=True))
    assert answer == Duplicate() or (isinstance(answer, Used) and answer.same_message and answer.result_stored)


@pytest.mark.parametrize("rolled_back", [True, False])
def test_transaction_alone_decides_whether_the_run_is_a_success(
    make_app: Callable[..., Celery], sql_url: str, user: Any, rolled_back: bool
) -> None:
    """Also if the body returns normally after a rollback."""

    @singleton_task(app=make_app(sql_url), once_per="forever", bind=True)
    def book(self: SingletonTask) -> None:
        with user.transaction(force_rollback=rolled_back):
            self.lease.settle(user)

    book.apply(throw=True)
    last = book.used()
    assert (last and last.state) == (None if rolled_back else "used")
    assert book.apply().state == ("SUCCESS" if rolled_back else "REVOKED")


def test_lock_without_once_per_cannot_settle(app: Celery) -> None:
    with Lock("x", app=app) as lock, pytest.raises(DLockError, match="expected a task with once_per"):
        lock.lease.settle(object())
