"""Workers and publishers of two builds share locks, queues and marks while one build replaces the other."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from celery.result import AsyncResult

from tests.support.builds import build_of, environ_of
from tests.support.polling import eventually
from tests.support.processes import ROOT
from tests.support.servers import Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

APP = "tests.support.apps.two_versions"
#: The commit of the other build: the oldest one with today's wire. After a release it is the oldest tag of that wire.
OTHER = "3e5a6cf"
#: How a call may end that has not run, by policy. Under another policy, each call runs.
ENDS_WITHOUT_A_RUN = {
    **dict.fromkeys(("skip", "wait", "debounce", "replace", "unique", "once"), "REVOKED"),
    "raise": "FAILURE",
}


@pytest.fixture(scope="module")
def other_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_of(OTHER, tmp_path_factory.mktemp("build"))


class Run:
    """Two workers, which are replaced one by one, and one publisher of each build."""

    def __init__(self, folder: Path, urls: Urls, stack: ExitStack) -> None:
        self.folder, self.urls, self.stack = folder, urls, stack
        self.publishers: list[subprocess.Popen[str]] = []

    def worker(self, build: Path) -> Worker:
        made = running_worker(APP, folder=self.folder, urls=self.urls, concurrency=3, environ=environ_of(build))
        return self.stack.enter_context(made)

    def publish(self, build: Path, first: int, number: int) -> None:
        command = [sys.executable, "-m", APP, *map(str, (first, number, 4, 0.04))]
        environ = {**os.environ, **self.urls.environ(), **environ_of(build)}
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.folder, env=environ)
        self.publishers.append(started)
        self.stack.callback(started.kill)

    def published(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for publisher in self.publishers:
            output, _ = publisher.communicate(timeout=60)
            assert publisher.returncode == 0
            for policy, ids in json.loads(output).items():
                found.setdefault(policy, []).extend(ids)
        return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.invariant("two-versions-share-locks")
@pytest.mark.parametrize("direction", ["upgrade", "rollback"])
def test_a_rolling_change_of_the_version_loses_no_call_and_runs_none_twice(
    other_build: Path, tmp_path: Path, direction: str
) -> None:
    before, after = (other_build, ROOT) if direction == "upgrade" else (ROOT, other_build)
    with Server(tmp_path / "server") as server, ExitStack() as stack:
        urls = Urls(server.url(0), server.url(1), server.url(2))
        run = Run(tmp_path, urls, stack)
        workers = [run.worker(before), run.worker(before)]
        for number, build in enumerate((before, after)):
            run.publish(build, number * 250, 250)
        for place in (0, 1):
            eventually(lambda place=place: server_notes(server) > (1 + place) * 60, within=60)
            assert workers[place].stop() == 0
            workers[place] = run.worker(after)
        calls = run.published()
        with loaded_app(APP, urls) as tasks:
            ids = {one: policy for policy, its in calls.items() for one in its}
            eventually(
                lambda: all(AsyncResult(one, app=tasks.app).ready() for one in ids),
                within=120,
                message="calls without an end",
            )
            states = {one: AsyncResult(one, app=tasks.app).state for one in ids}
            notes = [json.loads(text) for text in tasks.history.lrange("history", 0, -1)]
    check(ids, states, notes, limits={"seats": 2})
    assert {note["build"] for note in notes} == {str(before), str(after)}


def server_notes(server: Server) -> int:
    with server.client(1) as client:
        return int(client.llen("history"))


def check(ids: dict[str, str], states: dict[str, str], notes: list[dict[str, object]], limits: dict[str, int]) -> None:
    runs = Counter(note["id"] for note in notes if note["what"] == "in")
    assert {one for one, number in runs.items() if number > 1} == set()
    ended = {policy: Counter(states[one] for one in ids if ids[one] == policy) for policy in set(ids.values())}
    assert [policy for policy, ends in ended.items() if not ends["SUCCESS"]] == []
    for one, policy in ids.items():
        if states[one] == "SUCCESS":
            assert runs[one] == 1, (policy, one, ended)
        elif policy == "replace" and runs[one]:
            assert states[one] == "REVOKED", (one, ended)  # a newer call has stopped it
        else:
            assert (states[one], runs[one]) == (ENDS_WITHOUT_A_RUN.get(policy), 0), (policy, one, ended)
    inside: Counter[tuple[object, object]] = Counter()
    for note in notes:
        key = note["task"], note["name"]
        inside[key] += 1 if note["what"] == "in" else -1
        assert inside[key] <= limits.get(str(note["task"]), 1), (key, ended)
