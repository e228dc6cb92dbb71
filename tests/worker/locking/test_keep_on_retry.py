"""``keep_on_retry``: the lock stays with a task between ``self.retry()`` and the retried execution."""

import pytest

from celery_dlock import LockHeld
from tests.conftest import WORKERS
from tests.support.environments.policies import running_environment, timed
from tests.support.polling import eventually

APP = "tests.support.apps.retrying"
#: Seconds until the retry, in which the rivals try.
DELAY = 2.0

pytestmark = pytest.mark.usefixtures("show_logs")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("retries"), app=APP, concurrency=6) as made:
        yield made


def first_ended(environment, result):
    return eventually(lambda: environment.history(what="out", id=result.id), 10, message="its first run")[0]


def bodies(environment, n, count):
    """Return the entries into bodies in order: (task, retries)."""
    entered = environment.entered(within=20, count=count, n=n)
    assert environment.overlaps(n) == 1
    return [(fact["task"].removeprefix("retrying."), fact["retries"]) for fact in entered]


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
@pytest.mark.core
def test_no_other_call_runs_between_a_task_and_its_retry(environment, tasks):
    n = environment.fresh()
    result = tasks.keeps.delay(n, seconds=DELAY)
    first_ended(environment, result)
    environment.wait_for_line(result.id, f"retry: Retry in {DELAY}s")
    rivals = {policy: task.delay(n) for policy, task in tasks.rivals.items()}
    assert timed(lambda: rivals["skip"].get(timeout=10))[1].__class__.__name__ == "CallSkipped"
    assert "its retry is to come: keep_on_retry" in str(rivals["skip"].result)
    assert isinstance(timed(lambda: rivals["raise"].get(timeout=10))[1], LockHeld)
    assert [rivals[policy].get(timeout=20) for policy in ("retry", "queue", "wait")] == [n] * 3
    inside = bodies(environment, n, 5)
    assert inside[:2] == [("keeps", 0), ("keeps", 1)]
    assert sorted(inside[2:]) == [("queue", 0), ("retry", 0), ("wait", 0)]


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
@pytest.mark.core
def test_other_call_runs_before_a_retry_without_keep_on_retry(environment, tasks):
    n = environment.fresh()
    result = tasks.lets_go.delay(n, seconds=DELAY)
    first_ended(environment, result)
    environment.free(tasks.lets_go, n, within=DELAY - 0.5)
    assert tasks.rivals["raise"].delay(n).get(timeout=10) == n
    assert result.get(timeout=10) == n
    assert bodies(environment, n, 3) == [("lets_go", 0), ("raise", 0), ("lets_go", 1)]


def test_reserved_lock_names_its_holder_and_its_token_grows(environment, tasks):
    n = environment.fresh()
    result = tasks.keeps.delay(n, seconds=DELAY)
    first_ended(environment, result)
    lock = tasks.keeps.lock_for(n)
    holder = eventually(
        lambda: (found := lock.holder()) and found.kind == "keep_on_retry" and found, 5, message="it is kept"
    )
    assert (holder.task, holder.task_id) == ("retrying.keeps", result.id)
    assert 25 < holder.expires_in <= 30 + DELAY  # the countdown, and a ttl of 30 s
    assert not lock.acquire(blocking=False)
    assert result.get(timeout=10) == n
    first, second = environment.history(what="in", id=result.id)
    assert second["token"] > first["token"]
    environment.free(tasks.keeps, n, within=2)


@pytest.mark.parametrize(
    ("task", "way", "seconds"),
    [("keeps", "eta", DELAY), ("keeps_auto", "auto", 0), ("keeps", "no throw", DELAY), ("keeps", "", 0)],
    ids=["by eta", "autoretry_for", "throw=False", "at once"],
)
def test_lock_is_kept_for_every_kind_of_retry(environment, tasks, task, way, seconds):
    n = environment.fresh()
    retried = getattr(tasks, task).delay(n, way, seconds)
    first_ended(environment, retried)
    if task == "keeps_auto" or seconds:
        assert isinstance(timed(lambda: tasks.rivals["raise"].delay(n).get(timeout=10))[1], LockHeld)
    assert bodies(environment, n, 2) == [(task, 0), (task, 1)]
    environment.free(tasks.keeps, n, within=5)


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
def test_reservation_of_a_revoked_retry_expires(environment, tasks):
    n = environment.fresh()
    result = tasks.keeps_briefly.delay(n, seconds=DELAY)
    out = first_ended(environment, result)
    environment.wait_for_line(result.id, "retry: Retry")
    environment.app.control.revoke(result.id)
    assert tasks.rivals["wait"].delay(n).get(timeout=20) == n
    (entered,) = environment.history(what="in", n=n, task="retrying.wait")
    assert DELAY + 0.8 < entered["at"] - out["at"] < DELAY + 3  # the countdown, and a ttl of 1 s
    assert bodies(environment, n, 2) == [("keeps_briefly", 0), ("wait", 0)]


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
@pytest.mark.parametrize("seconds", [0.0, DELAY], ids=["a retry that is there before the release", "a later one"])
def test_waiters_under_queue_come_after_the_retry(environment, tasks, seconds):
    n = environment.fresh()
    first = tasks.keeps_queued.delay(n, "", seconds)
    others = [tasks.rivals["queue"].delay(n) for _ in range(2)]
    assert first.get(timeout=20) == n
    assert [other.get(timeout=20) for other in others] == [n, n]
    inside = bodies(environment, n, 4)
    place = inside.index(("keeps_queued", 0))
    assert inside[place + 1] == ("keeps_queued", 1), inside


@pytest.mark.invariant("kept-lock-belongs-to-its-retry")
@pytest.mark.parametrize("way", ["other args", "no more", "replace"])
def test_release_without_a_retry_frees_the_lock_at_once(environment, tasks, way):
    n = environment.fresh()
    result = tasks.keeps.delay(n, way, DELAY)
    first_ended(environment, result)
    environment.free(tasks.keeps, n, within=DELAY - 0.5)
    result.get(timeout=10, propagate=way != "no more")
    assert result.state == ("FAILURE" if way == "no more" else "SUCCESS")


def test_a_retry_does_not_use_the_name_up(environment, tasks):
    n = environment.fresh()
    assert tasks.keeps_once.delay(n, seconds=0.2).get(timeout=10) == n
    assert bodies(environment, n, 2) == [("keeps_once", 0), ("keeps_once", 1)]
    again = tasks.keeps_once.delay(n)
    again.get(timeout=10, propagate=False)
    assert again.state == "REVOKED"


def test_success_that_uses_the_name_keeps_no_lock_for_its_published_retry(environment, tasks):
    n = environment.fresh()
    assert tasks.keeps_once.delay(n, "no throw", 5.0).get(timeout=10) == n
    environment.free(tasks.keeps_once, n, within=2)


@pytest.mark.parametrize("task", ["keeps_full", "keeps_raising"])
def test_retry_delivered_before_the_release_waits_for_it(environment, tasks, task):
    n = environment.fresh()
    result = getattr(tasks, task).delay(n, seconds=0)
    eventually(lambda: environment.history(what="in", id=result.id), 10)
    waiter = tasks.rivals["queue"].delay(n)
    assert result.get(timeout=15) == n
    assert waiter.get(timeout=15) == n
    assert [fact["id"] for fact in environment.history(what="in", n=n)] == [result.id, result.id, waiter.id]


def test_an_eager_retry_runs_under_the_same_lock(environment, tasks):
    n = environment.fresh()
    assert tasks.keeps.apply((n,), {"seconds": 30}).get() == n
    assert bodies(environment, n, 2) == [("keeps", 0), ("keeps", 1)]
    assert not environment.locked(tasks.keeps, n)


def test_a_worker_killed_while_its_retry_waits_leaves_it_to_another_worker(tmp_path, request):
    conf = {
        "broker_transport_options": {
            "visibility_timeout": 3,
            "unacked_restore_interval": 0.5,
            "unacked_restore_throttle": 0.5,
            # A worker that dies while it restores keeps the others from it for so long, else for 5 minutes.
            "unacked_mutex_expire": 1,
        },
    }
    with running_environment(tmp_path, app=APP, workers=2, concurrency=2, conf=conf) as environment:
        request.node.stash[WORKERS] = environment.workers
        n = environment.fresh()
        result = environment.tasks.keeps.delay(n, seconds=2.0)
        first_ended(environment, result)
        eventually(
            lambda: environment.unacked(result.id)["headers"]["retries"] == 1, 10, message="the first run's is not gone"
        )
        environment.wait_for_line(result.id, "Retry in")
        eventually(lambda: len(environment.lines(result.id, "received")) == 2, 10, message="the retry is received")
        received = [worker for worker in environment.workers if f"[{result.id}] received" in worker.log()]
        # Where two workers have it, the first run was in the one that says "Retry in".
        (holder,) = received if len(received) == 1 else [each for each in received if "Retry in" not in each.log()]
        holder.kill()
        rival = environment.tasks.rivals["retry"].delay(n)
        assert result.get(timeout=30) == n
        assert rival.get(timeout=30) == n
        assert bodies(environment, n, 3) == [("keeps", 0), ("keeps", 1), ("retry", 0)]
