"""The command ``metrics``: the gauges of the store, served for Prometheus."""

from __future__ import annotations

import threading

import click

from .options import option
from .output import note
from .session import NOTHING, session

__all__ = ["metrics"]


@click.command()
@option("--port", type=click.IntRange(0, 65535), default=9808, show_default=True, help="The port; 0: any free one.")
@option("--host", default="127.0.0.1", show_default=True, help="The address to bind. The page needs no password.")
def metrics(port: int, host: str) -> None:
    """Serve the gauges of the store for Prometheus until Ctrl-C.

    One such process is enough for all workers. It needs the package prometheus_client.
    """
    with session() as opened:
        from ..metrics import StoreCollector  # noqa: PLC0415  # every celery command imports this module
        from ..metrics.server import serve  # noqa: PLC0415

        bound = serve((host, port), [StoreCollector(opened.app)])
        context = click.get_current_context()
        if bound is None:  # the error is logged
            context.exit(NOTHING)
        note(f"the gauges of the store are served at http://{host}:{bound}/metrics; Ctrl-C ends")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            context.exit(0)
