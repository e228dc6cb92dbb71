"""A worker meets messages of a newer wire version: it leaves them to a newer worker, and none is lost."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.builds import build_with, environ_of
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.two_versions"


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.invariant("newer-wire-is-left-alone")
def test_messages_of_a_newer_worker_wait_for_a_newer_worker(tmp_path: Path) -> None:
    (tmp_path / "newer").mkdir()
    newer = build_with("messaging/wire.py", "WIRE_VERSION: Final = 1", "WIRE_VERSION: Final = 2", tmp_path / "newer")
    with Server(tmp_path / "server") as server, ExitStack() as stack:
        urls = Urls(server.url(0), server.url(1), server.url(2))
        tasks = stack.enter_context(loaded_app(APP, urls))

        def worker(environ: dict[str, str]) -> object:
            return running_worker(APP, folder=tmp_path, urls=urls, environ=environ)

        queue, retry = (tasks.app.tasks[policy] for policy in ("queue", "retry"))
        locks = [queue.lock_for(0, 1), retry.lock_for(0, 1)]
        for lock in locks:
            assert lock.acquire(blocking=False)
        with worker(environ_of(newer)) as first:
            results = [queue.delay(0, 1), retry.delay(0, 1)]
            first.wait_for_log(rf"{results[0].id}.* is parked", within=30)
            first.wait_for_log(rf"{results[1].id}.* is republished", within=30)
            assert first.stop() == 0
        with worker({}) as older:
            older.wait_for_log(rf"{results[1].id}.* is republished.*left to a worker of a newer version", within=30)
            for lock in locks:
                lock.release()
            older.wait_for_log(r"the next message is left to a worker of a newer version", within=30)
            assert tasks.history.llen("history") == 0
            # The older one goes on: it must not keep the newer one from sweeping the queue.
            with worker(environ_of(newer)):
                assert [result.get(timeout=120) for result in results] == [1, 1]
        notes = [json.loads(text) for text in tasks.history.lrange("history", 0, -1)]
        assert sorted(note["task"] for note in notes if note["what"] == "in") == ["queue", "retry"]
        assert {note["build"] for note in notes} == {str(newer)}
        assert eventually(lambda: not queue.lock_for(0, 1).locked())
