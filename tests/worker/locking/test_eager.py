"""apply() takes the lock; a direct call runs the function and nothing else."""

import json
import time
from threading import Event, Thread, Timer

import pytest

from celery_dlock import CallSkipped, LockHeld
from tests.support.environments.policies import APP, timed
from tests.support.lock_records import records


@pytest.fixture
def tasks(load_app):
    return load_app(APP)


@pytest.fixture
def eager(tasks):
    """The same app with task_always_eager."""
    tasks.app.conf.task_always_eager = True
    return tasks


@pytest.fixture
def history(client):
    return lambda **wanted: [
        fact
        for fact in map(json.loads, client.lrange("history", 0, -1))
        if all(fact.get(name) == value for name, value in wanted.items())
    ]


class Elsewhere:
    """Holds a lock as another owner: another thread."""

    def __init__(self, lock):
        self._held, self._over = Event(), Event()
        self._thread = Thread(target=self._hold, args=(lock,))
        self._thread.start()
        assert self._held.wait(10)

    def _hold(self, lock):
        with lock:
            self._held.set()
            self._over.wait(20)

    def let_go(self):
        self._over.set()
        self._thread.join(10)


@pytest.fixture
def held():
    """Hold a lock by another owner until the test ends."""
    holders = []

    def hold(lock):
        holders.append(Elsewhere(lock))
        return holders[-1]

    yield hold
    for holder in holders:
        holder.let_go()


class TestApply:
    @pytest.mark.invariant("direct-call-needs-no-store")
    @pytest.mark.core
    def test_it_runs_under_the_lock_and_frees_it(self, tasks, history):
        assert tasks.skips.apply(("n",)).get() == "n"
        (body,) = history(what="in")
        assert body["token"] > 0
        assert body["lock"] == tasks.skips.lock_name("n")
        assert not tasks.skips.lock_for("n").locked()

    def test_always_eager_does_the_same(self, eager, history):
        assert eager.skips.delay("n").get() == "n"
        assert history(what="in")[0]["token"] > 0
        assert not eager.skips.lock_for("n").locked()

    @pytest.mark.core
    def test_skip_ends_revoked_and_leaves_the_holders_lock_alone(self, tasks, held, history):
        lock = tasks.skips.lock_for("n")
        held(lock)
        holder = lock.holder()
        result = tasks.skips.apply(("n",))
        assert result.state == "REVOKED"
        with pytest.raises(CallSkipped, match="held by a Lock in process") as skipped:
            result.get()
        assert skipped.value.name == tasks.skips.lock_name("n")
        assert history() == []
        assert lock.holder().token == holder.token

    def test_skip_with_a_result_gives_it(self, tasks, held, history):
        held(tasks.skips_as_value.lock_for("n"))
        result = tasks.skips_as_value.apply(("n",))
        assert (result.state, result.get()) == ("SUCCESS", {"skipped": True})
        assert history(what="in") == []

    def test_wait_waits_for_the_release_and_runs(self, tasks, held):
        holder = held(tasks.waits.lock_for("n"))
        start = time.monotonic()
        Timer(0.3, holder.let_go).start()
        assert tasks.waits.apply(("n",)).get() == "n"
        assert 0.3 <= time.monotonic() - start < 3

    def test_wait_ends_at_its_timeout(self, tasks, held):
        held(tasks.waits_briefly.lock_for("n"))
        seconds, result = timed(lambda: tasks.waits_briefly.apply(("n",)))
        assert isinstance(result.result, LockHeld)
        assert 0.4 <= seconds < 1.4

    @pytest.mark.core
    def test_raise_fails_with_lock_held(self, tasks, held):
        held(tasks.raises.lock_for("n"))
        result = tasks.raises.apply(("n",))
        assert result.state == "FAILURE"
        with pytest.raises(LockHeld, match="held by"):
            result.get()

    @pytest.mark.parametrize("name", ["retries", "waits_then_retries"])
    def test_retry_fails_with_lock_held_that_says_why(self, tasks, held, name):
        task = getattr(tasks, name)
        held(task.lock_for("n"))
        with pytest.raises(LockHeld, match="an eager call has no message to retry"):
            task.apply(("n",)).get()

    def test_throw_raises_here(self, tasks, held):
        held(tasks.raises.lock_for("n"))
        with pytest.raises(LockHeld):
            tasks.raises.apply(("n",), throw=True)

    @pytest.mark.parametrize("end", ["fail", "ignore", "reject", "retry", "replace"])
    def test_lock_is_free_after_every_ending(self, tasks, end):
        timed(lambda: tasks.skips.apply(("n",), {"end": end}).get())
        assert not tasks.skips.lock_for("n").locked()
        assert tasks.skips.apply(("n",)).get() == "n"

    def test_its_own_retry_runs(self, tasks, history):
        assert tasks.skips.apply(("n",), {"end": "retry"}).get() == "n"
        assert [fact["retries"] for fact in history(what="in")] == [0, 1]

    def test_once_per_holds(self, tasks):
        assert tasks.once.apply(("n",)).get() == "n"
        assert tasks.once.apply(("n",)).state == "REVOKED"

    def test_once_per_holds_after_its_own_retry(self, tasks):
        assert tasks.once.apply(("n",), {"end": "retry"}).get() == "n"
        assert tasks.once.apply(("n",)).state == "REVOKED"

    def test_once_per_leaves_the_name_free_after_a_failure(self, tasks):
        assert tasks.once.apply(("n",), {"end": "fail"}).state == "FAILURE"
        assert tasks.once.apply(("n",)).get() == "n"

    def test_inside_the_body_that_holds_the_lock_it_re_enters(self, tasks):
        assert tasks.nests.apply(("n",)).get() == ["n", 2, 1]
        assert not tasks.nests.lock_for("n").locked()


class TestDirectCall:
    @pytest.mark.core
    def test_it_takes_no_lock_and_its_lease_is_null(self, tasks, history, clean_server):
        assert tasks.skips("n") == "n"
        (body,) = history(what="in")
        assert (body["token"], body["lock"]) == (None, None)
        assert records(clean_server) == []

    def test_it_runs_beside_a_holder_and_leaves_its_lock_alone(self, tasks, held):
        lock = tasks.skips.lock_for("n")
        held(lock)
        token = lock.holder().token
        assert tasks.skips("n") == "n"
        assert lock.holder().token == token

    @pytest.mark.invariant("direct-call-needs-no-store")
    def test_it_needs_no_store(self, load_app):
        tasks = load_app(APP, lock="redis://127.0.0.1:1/0")
        assert tasks.peeks() == (None, False, 0.0, False)

    def test_inside_a_body_it_leaves_the_bodys_lease_alone(self, tasks):
        assert tasks.calls_itself.apply(("n",)).get() is True
        assert not tasks.calls_itself.lock_for("n").locked()
