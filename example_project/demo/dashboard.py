"""The web dashboard on the demo's data, while the demo's processes are still up."""

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery

HOST, PORT = "127.0.0.1", 5556
#: Seconds between two samples for the charts, and between two calls that they show.
PERIOD, PAUSE = 5.0, 0.7


def sampling_dashboard(app: Celery) -> Any:
    """Return a dashboard that samples from now on, for its charts. Everyone may act: the data end with the demo."""
    from celery_dlock.web import dashboard  # noqa: PLC0415  # only --web needs it

    made = dashboard(app, access=lambda _: "act", user=lambda _: "demo")
    made.state.sampler.always(PERIOD)
    return made


def serve_until_interrupted(made: Any, say: Callable[[str], None]) -> None:
    """Serve the dashboard to this machine. Tasks are called meanwhile, so that the charts move."""
    from celery_dlock.web.server import serve  # noqa: PLC0415

    ended = threading.Event()
    caller = threading.Thread(target=_call_tasks, args=(ended,), daemon=True)
    caller.start()
    # uvicorn ends at Ctrl-C, and sends the signal again; the demo then goes on to its results.
    with contextlib.suppress(SystemExit):
        serve(made, HOST, PORT, ready=lambda: say(f"dashboard: http://{HOST}:{PORT}/ until Ctrl-C"))
    ended.set()
    caller.join()


def _call_tasks(ended: threading.Event) -> None:
    from example_project.shop.tasks import rebuild_index, yearly_report  # noqa: PLC0415  # it reads the environment

    for number in itertools.count():
        if ended.wait(PAUSE):
            return
        rebuild_index.delay(f"index {number % 2}", f"product {number}")
        yearly_report.delay(str(2000 + number // 5))
