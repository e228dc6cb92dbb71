"""once_per="tick": what a worker makes of stamped messages."""

import json
import re
import time

import pytest

from celery_dlock import InvalidTick
from celery_dlock.messaging.tick_header import header_for
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.ticking"


class Environment:
    """A worker, and what the bodies noted."""

    def __init__(self, tasks, client, worker):
        self.tasks = tasks
        self.client = client
        self.worker = worker
        self._due = int(time.time()) - 30

    def fresh(self):
        """A due time that no other test has."""
        self._due -= 1
        return float(self._due)

    def send(self, task, due, *args, entry="entry", headers=None, **options):
        return task.apply_async(args, headers={**header_for(task.name, entry, due), **(headers or {})}, **options)

    def runs(self, result):
        """The ticks of this message's runs."""
        return [fact["tick"] for fact in self._facts() if fact["id"] == result.id]

    def all_runs(self, task, **facts):
        found = [fact for fact in self._facts() if fact["task"] == task.name]
        return [fact for fact in found if facts.items() <= (fact["tick"] or {}).items()]

    def _facts(self):
        return [json.loads(text) for text in self.client.lrange("runs", 0, -1)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ticks")
    with Server(folder / "server") as server:
        urls = Urls(server.url(), server.url(), server.lock_url())
        with (
            running_worker(APP, folder=folder, urls=urls) as worker,
            loaded_app(APP, urls) as tasks,
            server.client() as client,
        ):
            yield Environment(tasks, client, worker)


def end_of(result):
    result.get(timeout=20, propagate=False)
    return result.state


@pytest.mark.invariant("tick-runs-once")
def test_a_tick_runs_once_however_many_messages_it_has(environment):
    due = environment.fresh()
    results = [environment.send(environment.tasks.tick, due) for _ in range(4)]
    assert sorted(map(end_of, results)) == ["REVOKED", "REVOKED", "REVOKED", "SUCCESS"]
    assert len(environment.all_runs(environment.tasks.tick, due=due)) == 1


def test_tick_is_read_if_a_tracing_tool_replaced_the_messages_headers(environment):
    """As Sentry and Datadog do: https://github.com/celery/celery/issues/4875."""
    due, traced = environment.fresh(), {"headers": {"trace": "1"}}
    first = environment.send(environment.tasks.tick, due, "retry", headers=traced)
    assert end_of(first) == "SUCCESS"
    assert [tick["due"] for tick in environment.runs(first)] == [due, due]
    assert end_of(environment.send(environment.tasks.tick, due, headers=traced)) == "REVOKED"


def test_other_due_time_or_entry_is_another_tick(environment):
    due, later = environment.fresh(), environment.fresh()
    ticks = [(due, "a"), (later, "a"), (due, "b"), (due + 1e-6, "a")]
    assert [end_of(environment.send(environment.tasks.tick, at, entry=entry)) for at, entry in ticks] == ["SUCCESS"] * 4


def test_a_call_without_a_stamp_runs_every_time(environment):
    assert [end_of(environment.tasks.tick.delay()) for _ in range(2)] == ["SUCCESS"] * 2


def test_message_without_tick_stamp_is_logged_once_per_task_and_process(environment):
    """It runs as a call by hand does, and the log warns that once_per="tick" has no effect."""
    said = r"Task {}\[\S+\] has once_per='tick' but .* -S celery_dlock\.beat:DLockScheduler"
    tasks = (environment.tasks.tick, environment.tasks.other)
    for task in tasks:
        sent = [task.apply_async(headers={"celery_beat_task": True}) for _ in range(6)]
        assert [end_of(result) for result in sent] == ["SUCCESS"] * 6
        environment.worker.wait_for_log(said.format(task.name))
    assert (
        end_of(environment.send(environment.tasks.brief, time.time(), headers={"celery_beat_task": True})) == "SUCCESS"
    )
    told = [re.findall(rf"(\S+\d)\] {said.format(task.name)}", environment.worker.log()) for task in tasks]
    assert all(len(processes) == len(set(processes)) for processes in told), told
    assert not re.search(r"ticking\.brief\[\S+\] has once_per='tick' but", environment.worker.log())


def test_a_failed_run_does_not_use_its_tick(environment):
    due = environment.fresh()
    assert end_of(environment.send(environment.tasks.tick, due, "fail")) == "FAILURE"
    assert end_of(environment.send(environment.tasks.tick, due)) == "SUCCESS"
    assert end_of(environment.send(environment.tasks.tick, due)) == "REVOKED"


@pytest.mark.invariant("tick-runs-once")
def test_a_retry_is_for_the_same_tick(environment):
    due = environment.fresh()
    result = environment.send(environment.tasks.tick, due, "retry")
    assert end_of(result) == "SUCCESS"
    assert [tick["due"] for tick in environment.runs(result)] == [due, due]
    assert end_of(environment.send(environment.tasks.tick, due)) == "REVOKED"


@pytest.mark.invariant("tick-runs-once")
def test_stamp_does_not_leak_into_messages_of_the_body(environment):
    due = environment.fresh()
    before = len(environment.all_runs(environment.tasks.other)), len(environment.all_runs(environment.tasks.tick))
    assert end_of(environment.send(environment.tasks.tick, due, "publish")) == "SUCCESS"
    eventually(lambda: len(environment.all_runs(environment.tasks.other)) == before[0] + 1, 20)
    eventually(lambda: len(environment.all_runs(environment.tasks.tick)) == before[1] + 2, 20)
    assert len(environment.all_runs(environment.tasks.tick, due=due)) == 1
    assert environment.all_runs(environment.tasks.other, due=due) == []


@pytest.mark.invariant("tick-runs-once")
def test_a_task_that_replaces_another_is_for_no_tick(environment):
    due = environment.fresh()
    replaced = environment.send(environment.tasks.tick, due, "replace")
    assert end_of(replaced) == "SUCCESS"
    assert [tick and tick["due"] for tick in environment.runs(replaced)] == [due, None]
    # Nor did it use that tick of its own.
    assert end_of(environment.send(environment.tasks.other, due)) == "SUCCESS"


@pytest.mark.invariant("hostile-messages-end-alone", "tick-runs-once")
@pytest.mark.parametrize(
    "stamp",
    [
        "text",
        7,
        [],
        {},
        {"task": "ticking.tick"},
        {"task": 3, "entry": "entry", "due": 1.0},
        {"task": "ticking.tick", "entry": "", "due": 1.0},
        {"task": "ticking.tick", "entry": "entry", "due": "1.0"},
        {"task": "ticking.tick", "entry": "entry", "due": True},
        {"task": "ticking.tick", "entry": "entry", "due": float("nan")},
        {"task": "ticking.tick", "entry": "entry", "due": float("inf")},
        {"task": "ticking.tick", "entry": "entry", "due": 10**400},
        {"task": "ticking.tick", "entry": "entry", "due": 0},
        {"task": "ticking.tick", "entry": "entry", "due": 4e9},  # in the year 2096
    ],
    ids=str,
)
def test_an_unusable_stamp_fails_its_task_and_no_other(environment, stamp):
    bad = environment.tasks.tick.apply_async(headers={"dlock_tick": stamp})
    with pytest.raises(InvalidTick, match=r"task 'ticking\.tick': invalid header 'dlock_tick': "):
        bad.get(timeout=20)
    assert bad.state == "FAILURE"
    assert environment.runs(bad) == []
    assert environment.worker.running


@pytest.mark.invariant("hostile-messages-end-alone")
def test_worker_acknowledges_unusable_stamps_and_goes_on(environment):
    assert end_of(environment.tasks.tick.delay()) == "SUCCESS"
    eventually(lambda: environment.client.hlen("unacked") == 0, 10)


def test_stamp_slightly_in_the_future_is_accepted(environment):
    due = time.time() + 30
    assert end_of(environment.send(environment.tasks.tick, due)) == "SUCCESS"
    assert end_of(environment.send(environment.tasks.tick, due)) == "REVOKED"


@pytest.mark.invariant("late-tick-is-a-misfire")
def test_a_tick_older_than_its_grace_is_skipped_and_counted(environment):
    sent = time.time()
    old = environment.send(environment.tasks.brief, sent - 90)
    assert end_of(old) == "REVOKED"
    said = re.search(r"'entry' was due (\d+) s ago \(misfire_grace\)", str(old.result))
    assert said
    assert 90 <= int(said[1]) <= 91 + time.time() - sent
    assert environment.runs(old) == []
    environment.worker.wait_for_log(r"ticking\.brief\[.*\] misfired")
    assert end_of(environment.send(environment.tasks.brief, time.time() - 30)) == "SUCCESS"


def test_a_misfire_with_a_skip_result_goes_on_with_it_and_leaves_the_tick_unused(environment):
    assert environment.send(environment.tasks.instead, time.time() - 90).get(timeout=20) == "too late"
    assert environment.all_runs(environment.tasks.instead) == []


@pytest.mark.invariant("tick-runs-once")
def test_a_tick_is_remembered_for_its_grace_and_four_minutes(environment):
    due = float(int(time.time()) - 5)
    assert end_of(environment.send(environment.tasks.brief, due)) == "SUCCESS"
    marks = list(environment.client.scan_iter("dlock:*:run:ticking.brief:*"))
    lives = [environment.client.pttl(key) / 1000 for key in marks]
    assert any(280 < life <= 300 for life in lives), lives
