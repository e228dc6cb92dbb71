"""Real Celery workers as subprocesses, and the same app in the test's own process."""

import importlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import celery.signals
from celery import _state
from celery.utils.dispatch import Signal

import celery_dlock.signals
from tests.support.environ import environment_variables
from tests.support.forkserver import fork_server
from tests.support.namespaces import at_home
from tests.support.polling import eventually
from tests.support.processes import ROOT, Process, kill_session, living_children, spawn, tail

#: Pools that can be started as forks, and what their environment may not tell them: see `fork_server`.
FORKED = {"prefork", "solo", "threads"}
READ_FIRST = ("PYTHON", "LD_")
START_SECONDS = 60  # a loaded machine with two cores starts several workers at once


@dataclass(frozen=True)
class Urls:
    """The URLs of an app's servers. An app of tests/support/apps reads them from the environment at import."""

    broker: str
    result: str
    lock: str

    def environ(self) -> dict[str, str]:
        return {
            "DLOCK_TEST_BROKER_URL": self.broker,
            "DLOCK_TEST_RESULT_URL": self.result,
            "DLOCK_TEST_LOCK_URL": self.lock,
        }


class Worker:
    """One running `celery worker`; made by `running_worker` or the fixture `start_worker`."""

    def __init__(self, process: Process, log_file: Path, node: str) -> None:
        self.process = process
        self.log_file = log_file
        self.node = node

    @property
    def pid(self) -> int:
        """The main process."""
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def children(self) -> list[int]:
        """Pids of the living pool processes, in no order."""
        return living_children(self.pid, recursive=True)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process only."""
        self.process.send_signal(number)

    def stop(self, within: float = 45.0) -> int:
        """Warm shutdown: running tasks end first. Returns the exit status.

        A pool child whose results were not read, for example after a lost connection, goes on for 30 s (billiard's
        ``_ensure_messages_consumed``). Its worker waits for it.
        """
        # A stopped process would not see its SIGTERM.
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.node} still runs {within} s after SIGTERM:\n{self.tail()}") from None

    def kill(self) -> None:
        """SIGKILL to the main process only: what happens to its children is for the test to see."""
        self.signal(signal.SIGKILL)
        self.process.wait(10)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        return tail(self.log_file, lines)

    def wait_for_log(self, pattern: str, within: float = 10.0) -> re.Match[str]:
        """Wait until the regular expression occurs in the log."""
        found = eventually(
            lambda: re.search(pattern, self.log()), within, message=f"{pattern!r} in the log of {self.node}"
        )
        assert found is not None  # for mypy: `eventually` returns what is truthy
        return found


@contextmanager
def running_worker(
    app: str,
    *args: str,
    folder: Path,
    urls: Urls,
    pool: str = "prefork",
    concurrency: int = 2,
    environ: Mapping[str, str] | None = None,
    node: str | None = None,
) -> Iterator[Worker]:
    """A ready worker of the module `app` (such as "tests.support.apps.basic"); nothing of it lives afterwards.

    Args:
        args: further arguments of `celery worker`, such as `"-Q", "a,b"`.
        node: its name; by default one that no other has.
    """
    own = f"w{uuid.uuid4().hex[:8]}@test"
    node = node or own
    # Mingle sleeps a second at the start. With one worker, tests that need it or gossip cannot show the difference.
    always = ["--without-mingle", "--without-gossip", "--loglevel", "INFO", "--hostname", node]
    arguments = ["-A", app, "worker", "-P", pool, "-c", str(concurrency), *always, *args]
    folder.mkdir(parents=True, exist_ok=True)
    log_file = folder / f"{own}.log"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "C_FORCE_ROOT": "1"}
    told = {**fixed, **urls.environ(), **(environ or {})}
    process: Process
    forked = pool in FORKED and not any(name.startswith(READ_FIRST) for name in environ or {})
    if forked and at_home() and "DLOCK_TEST_EXEC" not in os.environ:
        process = fork_server().fork(arguments, log_file, {**os.environ, **told})
    else:
        process = spawn([sys.executable, "-m", "celery", *arguments], log_file, environ=told)
    worker = Worker(process, log_file, node)
    try:
        _wait_until_ready(worker)
        yield worker
    finally:
        kill_session(process)


def _wait_until_ready(worker: Worker) -> None:
    def answer() -> str:
        if not worker.running:
            return "dead"
        return "ready" if f"{worker.node} ready." in worker.log() else ""

    try:
        state = eventually(answer, START_SECONDS, every=0.05, message=f"{worker.node} is not ready")
    except AssertionError as late:
        raise AssertionError(f"{late}\n{worker.tail()}") from None
    assert state == "ready", f"{worker.node} ended with {worker.process.returncode}:\n{worker.tail()}"


@contextmanager
def loaded_app(module: str, urls: Urls) -> Iterator[ModuleType]:
    """The app module imported afresh with these servers, so that no test meets another's connections."""
    sys.modules.pop(module, None)
    # The last app made stays the current one, and the next test's shared tasks would be looked up there.
    current = _state._tls.current_app  # type: ignore[attr-defined]  # not in the stubs
    # Nor may the next test's signals be received, or its app be given the tasks, by this one's module.
    shared = set(_state._on_app_finalizers)  # type: ignore[attr-defined]  # not in the stubs
    receivers = [(told, list(told.receivers or ())) for told in _signals()]
    with environment_variables(urls.environ()):
        loaded = importlib.import_module(module)
    try:
        yield loaded
    finally:
        _stop_listening(loaded.app)
        loaded.app.close()
        _state._tls.current_app = current  # type: ignore[attr-defined]  # not in the stubs
        _state._on_app_finalizers.intersection_update(shared)  # type: ignore[attr-defined]  # not in the stubs
        for told, connected in receivers:
            told.receivers = connected


def _stop_listening(app: Any) -> None:
    """Results that outlive the server would take leave of it, one by one, whenever they are collected."""
    listener = getattr(app.backend, "result_consumer", None)
    if listener is not None:
        listener.stop()
        listener._pubsub = None


def _signals() -> list[Signal]:
    """Celery's signals and ours, which all apps of a process share."""
    rooms = (vars(celery.signals), vars(celery_dlock.signals))
    return [told for room in rooms for told in room.values() if isinstance(told, Signal)]
