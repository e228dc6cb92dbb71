"""The web dashboard on the demo's data, while the demo's processes are still up."""

import contextlib
from collections.abc import Callable

from celery import Celery

HOST, PORT = "127.0.0.1", 5556


def serve_until_interrupted(app: Celery, say: Callable[[str], None]) -> None:
    """Serve the dashboard to this machine. Everyone on it may act: the data end with the demo."""
    from celery_dlock.web import dashboard  # noqa: PLC0415  # only --web needs it
    from celery_dlock.web.server import serve  # noqa: PLC0415

    made = dashboard(app, access=lambda _: "act", user=lambda _: "demo")
    # uvicorn ends at Ctrl-C, and sends the signal again; the demo then goes on to its results.
    with contextlib.suppress(SystemExit):
        serve(made, HOST, PORT, ready=lambda: say(f"dashboard: http://{HOST}:{PORT}/ until Ctrl-C"))
