"""``on_store_error="local"`` in one process: the lock file beside the lease, and in place of it."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_dlock import LockLost, StoreUnavailable, signals, singleton_task
from celery_dlock.runtime import Runtime
from celery_dlock.store.model import Requester
from celery_dlock.testing import DLockKit

pytestmark = pytest.mark.core

#: Nothing listens at this port.
AWAY = "127.0.0.1:1"
OTHER = Requester("app.other", "id9", "w9@host", "9")


@pytest.fixture
def app() -> Celery:
    return Celery("local", broker="memory://", backend="cache+memory://", set_as_current=False)


@pytest.fixture
def kit(app: Celery) -> Iterator[DLockKit]:
    with DLockKit(app) as made:
        yield made


def task_of(app: Celery, **options: Any) -> Any:
    @singleton_task(app=app, bind=True, name="local.work", on_store_error="local", **options)
    def work(self: Any) -> Any:
        lease = self.lease
        return [lease.local, lease.held, lease.token is not None]

    return work


def held_elsewhere(app: Celery, task: Any, *, releasing: bool = False) -> None:
    """Take the lock file for another owner of this machine."""
    files, name = Runtime.of(app).lock_files, task.lock_spec.name_of((), {})
    assert files.acquire(name, "other", "other", OTHER) is None
    if releasing:
        files.announce_release(name, "other")


def free_elsewhere(app: Celery, task: Any) -> None:
    Runtime.of(app).lock_files.release(task.lock_spec.name_of((), {}), "other", "other")


@pytest.mark.usefixtures("kit")
def test_call_with_a_store_has_a_lease_and_no_local_lock(app: Celery) -> None:
    assert task_of(app).delay().get() == [False, True, True]


@pytest.mark.parametrize(
    "url",
    [
        f"redis://{AWAY}",
        f"sentinel://{AWAY}",
        f"redis+cluster://{AWAY}",
        [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)],
    ],
    ids=["server", "sentinel", "cluster", "redlock"],
)
def test_call_without_a_store_of_any_kind_has_the_local_lock(app: Celery, tmp_path: Path, url: Any) -> None:
    options = {"master_name": "mymaster"} if isinstance(url, str) and url.startswith("sentinel") else None
    app.conf.update(dlock_url=url, dlock_transport_options=options, dlock_run_dir=str(tmp_path / "run"))
    assert task_of(app).apply().get() == [True, False, False]


@pytest.mark.invariant("store-error-local-excludes")
def test_lock_file_of_another_owner_refuses_a_call_that_got_the_lock(kit: DLockKit, app: Celery) -> None:
    """The lock in the store is free again."""
    task = task_of(app, on_conflict="skip")
    held_elsewhere(app, task)
    refused = task.delay()
    assert refused.state == "REVOKED"
    assert "held by app.other[id9] on w9@host (by the lock file of this machine) since " in str(refused.result)
    assert [event.kind for event in kit.events] == ["acquired", "released", "refused", "skipped"]
    free_elsewhere(app, task)
    assert task.delay().get() == [False, True, True]


@pytest.mark.usefixtures("kit")
def test_wait_ends_when_the_lock_file_is_held_for_too_long(app: Celery) -> None:
    task = task_of(app, wait=0.1)
    held_elsewhere(app, task)
    refused = task.delay()
    assert refused.state == "REVOKED"
    assert "; waited 0.1 s (wait)" in str(refused.result)
    free_elsewhere(app, task)


def test_signal_says_that_the_lock_is_local(kit: DLockKit, app: Celery) -> None:
    heard = []

    def receive(sender: Any, event: Any, **_: Any) -> None:
        heard.append((sender.name, event.kind, event.local, event.token))

    signals.lock_bypassed.connect(receive)
    try:
        with kit.store_down():
            assert task_of(app).delay().get() == [True, False, False]
    finally:
        signals.lock_bypassed.disconnect(receive)
    assert heard == [("local.work", "bypassed", True, None)]


def test_lease_of_a_local_lock_does_not_pass_ensure(kit: DLockKit, app: Celery) -> None:
    @singleton_task(app=app, bind=True, name="local.insisting", on_store_error="local")
    def insisting(self: Any) -> None:
        assert repr(self.lease) == f"<BypassLease {self.lock_name()} local=True>"
        for ask in (self.lease.ensure, lambda: self.lease.extend(5)):
            with pytest.raises(LockLost, match="is held on this machine only: the store did not answer"):
                ask()

    with kit.store_down():
        assert insisting.delay().get() is None


@pytest.fixture
def unusable(kit: DLockKit, app: Celery, tmp_path: Path) -> str:
    """The run directory is missing, and so is its parent."""
    assert kit.events == []  # the kit is active, so these are its lock files
    Runtime.of(app).lock_files.directory.path = str(tmp_path / "missing/run")
    return f"the run directory {tmp_path}/missing/run cannot be used: No such file or directory"


@pytest.mark.invariant("nothing-runs-unlocked")
def test_without_store_and_lock_file_nothing_runs(kit: DLockKit, app: Celery, unusable: str) -> None:
    with kit.store_down("away"):
        error = task_of(app).delay().result
    assert isinstance(error, StoreUnavailable)
    assert str(error).endswith(f"away; {unusable}")


def test_with_a_store_a_call_runs_without_its_lock_file_and_warns_once(
    app: Celery, unusable: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "celery_dlock")
    task = task_of(app)
    for _ in range(2):
        assert task.delay().get() == [False, True, True]
    (line,) = [record.message for record in caplog.records]
    assert line.endswith(f"holds its lock {task.lock_name()} without a lock file, so on_store_error='local' calls of "
                         f"this machine do not see it: {unusable}")  # fmt: skip


@pytest.mark.usefixtures("kit")
def test_task_without_the_option_uses_no_lock_file(app: Celery) -> None:
    @singleton_task(app=app, name="local.plain")
    def plain() -> None: ...

    assert plain.delay().state == "SUCCESS"
    assert "_lock_files" not in vars(Runtime.of(app))
