"""Set up the shop, play the scenario and judge it. The exit code is 0 if all promises held."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import example_project
from example_project.demo import dashboard, databases, promises, questions, recorder, unlocked
from example_project.demo.history import History
from example_project.demo.ledgers import ledger_rows
from example_project.demo.processes import Processes
from example_project.demo.scenario import BEATS, FULL, LEDGER_WORKERS, SHORT, WORKERS, Scenario
from example_project.demo.screen import Screen
from example_project.demo.server import start_server
from example_project.demo.shop_floor import ShopFloor
from example_project.demo.sinks import sms_gateway, smtp_server
from example_project.demo.verdict import Evidence, rows
from example_project.demo.watched_celery import HISTORY, SETTINGS, WITHOUT_LOCKS

LIMIT = 45.0  # seconds for the whole demo
STOPPING = 8.0  # seconds of it to end every process

SHOWN = 5  # most faults to print for one promise

# Shorter than in a real shop, so that the demo need not wait for a minute or an hour.
# If a worker dies while it takes a granted message from the broker, the grant times out and is made again.
SETTINGS_OF_ALL = {"dlock_grant_timeout": 6}
LEDGER_SETTINGS = SETTINGS_OF_ALL | {
    # After this time the broker delivers the messages of a dead worker again. The ledgers have keys of their own: for
    # other queues, so short a time would deliver copies of every message that waits in a worker.
    "broker_transport_options": {
        "visibility_timeout": 4,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_key": "ledgers-unacked",
        "unacked_index_key": "ledgers-unacked-index",
        "unacked_mutex_key": "ledgers-unacked-mutex",
        # A worker that dies while it restores messages blocks the others for this time, by default 5 minutes.
        "unacked_mutex_expire": 1,
    },
}

T = TypeVar("T")
Answers = list[tuple[str, list[str]]]

PROMISE_BROKEN = 1
NOT_PLAYED = 2


def main() -> int:
    arguments = _arguments()
    # SystemExit unwinds the stack below, which ends every process. SIGINT needs it too: if a KeyboardInterrupt strikes
    # inside an `exec`, such as a dataclass runs, `python -m` kills itself by SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _end)
    sys.unraisablehook = _strike_again
    with Screen(picture=arguments.svg) as screen:
        try:
            failure, evidence, answers = _unveiled(_play, screen, arguments)
        except SystemExit as end:
            screen.say("interrupted; every process was ended")
            return int(end.code or 0)
    screen.result(rows(evidence), ledger_rows(evidence))
    if failure:
        screen.say(f"NOT PLAYED TO ITS END: {failure}", style="bold red")
    broken = list(promises.broken(evidence))
    for promise, faults in broken:
        screen.say(f"PROMISE BROKEN: {promise}", style="bold red")
        for fault in faults[:SHOWN]:
            screen.say(f"  {fault}")
        if more := len(faults[SHOWN:]):
            screen.say(f"  and {more} more")
    if failure or broken:
        return NOT_PLAYED if failure else PROMISE_BROKEN
    screen.say("every promise held", style="bold green")
    screen.save_picture()
    screen.answers(answers)
    return 0


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + (signal.SIGTERM if number == signal.SIGALRM else number))


def _unveiled(call: Callable[..., T], *args: Any) -> T:
    """Until 3.12 Python hides what strikes while a class is made, as in an import, in a RuntimeError."""
    try:
        return call(*args)
    except RuntimeError as error:
        if isinstance(error.__cause__, SystemExit):
            raise error.__cause__ from None
        raise


def _strike_again(swallowed: Any) -> None:
    """Send the signal again if it struck in a finaliser, where Python ignores exceptions."""
    if isinstance(swallowed.exc_value, SystemExit):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    else:
        sys.__unraisablehook__(swallowed)


def _play(screen: Screen, arguments: argparse.Namespace) -> tuple[str, Evidence, Answers]:
    ends_at = time.monotonic() + LIMIT - STOPPING
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="celery-dlock-demo-")))
        screen.say("starting an SMTP server, an SMS gateway and a Valkey server")
        smtp, mailbox = stack.enter_context(smtp_server())
        sms, gateway = stack.enter_context(sms_gateway())
        processes = stack.enter_context(Processes(arguments.logs or folder))
        redis_url = start_server(processes, folder)
        os.environ.update(_shop_settings(folder, redis_url, smtp, sms, metrics=arguments.web))
        if arguments.store:
            screen.say(f"starting {databases.DATABASES[arguments.store].name}, which keeps the locks")
            os.environ["DLOCK_URL"] = stack.enter_context(databases.migrated(arguments.store))
        os.environ[WITHOUT_LOCKS] = "1" if arguments.without_locks else ""
        if arguments.without_locks:
            screen.say("THE LOCKS ARE OFF")
            unlocked.install()
        from example_project.shop import app  # noqa: PLC0415  # it reads the environment set above

        history = History(folder / "history")
        recorder.install(app, history)
        stack.callback(app.close)
        floor = ShopFloor(
            app,
            processes,
            history,
            screen,
            counters={"shop.send_receipt": mailbox.received, "shop.send_sms": gateway.delivered},
            recognised={"shop.send_sms": gateway.recognised},
            locking=not arguments.without_locks,
            ends_at=ends_at,
        )
        _start_celery(processes, folder)
        web = dashboard.sampling_dashboard(app) if arguments.web else None
        stack.callback(screen.say, "ending every process")
        failure = Scenario(floor, SHORT if arguments.short else FULL).failure()
        evidence = floor.evidence()
        # With the locks off, the store is empty. After a failure, it may be gone.
        return failure, evidence, [] if failure or arguments.without_locks else _answers(screen, evidence, web)


def _answers(screen: Screen, evidence: Evidence, web: Any) -> Answers:
    found = questions.answers(evidence.facts, evidence.states)
    if web is not None:
        dashboard.serve_until_interrupted(web, screen.say)
    return found


def _start_celery(processes: Processes, folder: Path) -> None:
    celery = (sys.executable, "-m", "example_project.demo.watched_celery")
    for name in WORKERS:
        options = ("--concurrency=3", f"--hostname={name}@%h", "--loglevel=INFO")
        processes.start(name, *celery, "worker", *options)
    for name, queue in LEDGER_WORKERS.items():
        options = ("--concurrency=2", f"--hostname={name}@shop", f"--queues={queue}", "--loglevel=INFO")
        env = os.environ | {SETTINGS: json.dumps(LEDGER_SETTINGS)}
        processes.start(name, *celery, "worker", *options, env=env)
    # The scheduler belongs to the library, which a stub replaces if the locks are off.
    scheduler = () if os.environ[WITHOUT_LOCKS] else ("--scheduler=celery_dlock.beat:DLockScheduler",)
    for name in BEATS:
        processes.start(name, *celery, "beat", *scheduler, f"--schedule={folder / name}", "--loglevel=INFO")


def _shop_settings(folder: Path, redis_url: str, smtp: str, sms: str, *, metrics: bool) -> dict[str, str]:
    root = str(Path(example_project.__file__).parents[1])
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "REDIS_URL": redis_url,
        "DLOCK_URL": redis_url,
        "SMTP_SERVER": smtp,
        "SMS_GATEWAY": sms,
        "SHOP_REPORT_EVERY": "3",
        HISTORY: str(folder / "history"),
        # The charts of the dashboard show what workers count.
        SETTINGS: json.dumps(SETTINGS_OF_ALL | ({"dlock_metrics_port": 0} if metrics else {})),
        # Celery prefers these to the shop's own settings, and the user's environment may define them.
        "CELERY_BROKER_URL": redis_url,
        "CELERY_RESULT_BACKEND": redis_url,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=__doc__)
    parser.add_argument("--without-locks", action="store_true", help="show what the locks prevent; fails")
    parser.add_argument("--short", action="store_true", help="fewer sends and one report")
    parser.add_argument("--web", action="store_true", help="serve the dashboard at the end, until Ctrl-C")
    parser.add_argument("--store", choices=list(databases.DATABASES), help="keep the locks in a database")
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes in this folder")
    parser.add_argument("--svg", type=Path, help="save what is printed as a picture, if every promise held")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
