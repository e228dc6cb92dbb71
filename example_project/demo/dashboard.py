"""The web dashboard on the demo's data, while the demo's processes are still up."""

import contextlib
from collections.abc import Callable
from typing import Any

from celery import Celery

HOST, PORT = "127.0.0.1", 5556


def sampling_dashboard(app: Celery) -> Any:
    """Return a dashboard that samples from now on, for its charts. Everyone may act: the data end with the demo."""
    from celery_dlock.web import dashboard  # noqa: PLC0415  # only --web needs it

    made = dashboard(app, access=lambda _: "act", user=lambda _: "demo")
    made.state.sampler.always()
    return made


def serve_until_interrupted(made: Any, say: Callable[[str], None]) -> None:
    """Serve the dashboard to this machine."""
    from celery_dlock.web.server import serve  # noqa: PLC0415

    # uvicorn ends at Ctrl-C, and sends the signal again; the demo then goes on to its results.
    with contextlib.suppress(SystemExit):
        serve(made, HOST, PORT, ready=lambda: say(f"dashboard: http://{HOST}:{PORT}/ until Ctrl-C"))
