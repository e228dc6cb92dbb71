"""Real Celery beats as subprocesses."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.polling import eventually
from tests.support.processes import ROOT, kill_session, spawn
from tests.support.workers import START_SECONDS, Urls, Worker

SCHEDULER = "celery_dlock.beat:DLockScheduler"


@contextmanager
def running_beat(
    app: str,
    name: str,
    *,
    folder: Path,
    urls: Urls,
    scheduler: str = SCHEDULER,
    log: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """A started `celery beat` of the module `app`; nothing of it lives afterwards.

    Args:
        name: Of the file in which it keeps when entries ran: a second beat of that name goes on with it.
        scheduler: As for beat's option `-S`.
        log: The name of its log, if it is not `name`.
    """
    command = [sys.executable, "-m", "celery", "-A", app, "beat", "-S", scheduler, "--pidfile=", "--loglevel", "INFO"]
    if scheduler == SCHEDULER:
        command += ["--schedule", str(folder / name)]
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    log_file = folder / f"{log or name}.log"
    process = spawn(command, log_file, environ={**fixed, **urls.environ(), **(environ or {})})
    beat = Worker(process, log_file, log or name)
    try:
        eventually(
            lambda: not beat.running or "beat: Starting" in beat.log(), START_SECONDS, message=f"{name} does not start"
        )
        assert beat.running, beat.tail()
        yield beat
    finally:
        kill_session(process)
