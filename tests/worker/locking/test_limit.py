"""``limit=3`` at work: each body has a seat of its own, and kills leave one body in each seat."""

import pytest

from celery_dlock import LockHeld
from tests.support.environments.policies import running_environment
from tests.support.polling import eventually
from tests.worker.queue.queue_run import measure

pytestmark = pytest.mark.usefixtures("show_logs")

LIMIT = 3


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("limit"), app="tests.support.apps.seating", concurrency=6) as made:
        yield made


class Full:
    """A name whose seats are all held by bodies that wait at their gates."""

    def __init__(self, environment, task):
        self.environment, self.task, self.n = environment, task, environment.fresh()
        self.gates = {}

    def __enter__(self):
        for number in range(LIMIT):
            self.task.delay(self.n, f"{self.n}-{number}")
        entered = self.environment.entered(n=self.n, count=LIMIT)
        self.gates = {note["seat"]: note["gate"] for note in entered}
        return self

    def __exit__(self, *_):
        for seat in list(self.gates):
            self.leave(seat)

    def leave(self, seat):
        """Let the body of this seat end."""
        self.environment.open(self.gates.pop(seat))


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.core
class TestConflicts:
    def test_bodies_of_one_name_have_different_seats_and_tokens(self, environment, tasks):
        with Full(environment, tasks.skips) as full:
            entered = environment.history(what="in", n=full.n)
            assert sorted(note["seat"] for note in entered) == [0, 1, 2]
            assert len({note["token"] for note in entered}) == LIMIT

    def test_call_that_finds_no_free_seat_is_skipped(self, environment, tasks):
        with Full(environment, tasks.skips) as full:
            skipped = tasks.skips.delay(full.n)
            skipped.get(timeout=10, propagate=False)
            assert skipped.state == "REVOKED"

    def test_call_that_finds_no_free_seat_fails_under_raise(self, environment, tasks):
        with Full(environment, tasks.raises) as full, pytest.raises(LockHeld):
            tasks.raises.delay(full.n).get(timeout=10)

    @pytest.mark.parametrize("policy", ["queues", "retries", "waits"])
    def test_late_call_runs_on_the_seat_that_becomes_free(self, environment, tasks, policy):
        task = getattr(tasks, policy)
        with Full(environment, task) as full:
            late = task.delay(full.n)
            full.leave(1)
            assert late.get(timeout=20) == 1
            assert environment.overlaps(full.n) == LIMIT

    def test_lock_of_the_task_is_entered_again_inside_the_body(self, environment, tasks):
        n = environment.fresh()
        result = tasks.skips.delay(n, "", "nested")
        assert result.get(timeout=10) == 0
        assert environment.history(what="nested", id=result.id)


@pytest.mark.invariant("dead-owner-is-released", "seats-are-locks")
@pytest.mark.core
def test_seat_of_a_killed_process_is_free_at_once_and_the_others_stay_held(environment, tasks):
    n = environment.fresh()
    for number in range(LIMIT):
        tasks.late.delay(n, f"{n}-{number}", "die" if number == 1 else "")
    entered = environment.entered(n=n, count=LIMIT)
    (dying,) = [note for note in entered if note["gate"] == f"{n}-1"]
    environment.open(dying["gate"])
    environment.open(dying["gate"])  # for its second run
    second = environment.entered(n=n, count=LIMIT + 1, within=20)[-1]
    # Its lease would have lasted for 30 s.
    assert (second["id"], second["seat"]) == (dying["id"], dying["seat"])
    for number in (0, 2):
        environment.open(f"{n}-{number}")
    eventually(lambda: len(environment.history(what="out", n=n)) == LIMIT)


@pytest.mark.invariant("seats-are-locks")
@pytest.mark.parametrize("task", ["retries", "waits"])
@pytest.mark.parametrize(
    ("messages", "names", "kills"), [(200, 2, 2), pytest.param(1000, 10, 6, marks=pytest.mark.slow)]
)
def test_kills_leave_one_body_in_each_seat_and_lose_no_call(task, messages, names, kills):
    app = "tests.support.apps.seats_e2e"
    found = measure(messages=messages, names=names, kills=kills, workers=3, seed=1, app=app, task=task)
    assert found.ran + found.never_noted == found.messages, found
    assert (found.overlaps, found.twice_alive) == (0, 0), found
    assert found.children_killed + found.workers_killed == kills, found
    assert found.accounts <= {f"{name}/{seat}" for name in range(names) for seat in range(LIMIT)}
