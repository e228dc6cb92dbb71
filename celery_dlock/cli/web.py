"""The command ``web``: the dashboard with a server of its own."""

from __future__ import annotations

from pathlib import Path

import click

from .options import option
from .output import note
from .session import session

__all__ = ["web"]


@click.command()
@option("--host", default="127.0.0.1", show_default=True, help="The address to bind.")
@option("--port", type=click.IntRange(1, 65535), default=5556, show_default=True, help="The port to bind.")
@option(
    "--auth-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of users, as htpasswd -B writes it. They may act, unless --access decides.",
)  # fmt: skip
@option("--access", help="MODULE:FUNCTION that returns the rights of a request.")
@option("--root-path", default="", help="The path under which a proxy shows the dashboard, such as /dlock.")
@option(
    "--allowed-host", "hosts", multiple=True, metavar="NAME",
    help="A name under which browsers reach it. .example.com: also all names below it.",
)  # fmt: skip
def web(
    host: str, port: int, auth_file: Path | None, access: str | None, root_path: str, hosts: tuple[str, ...]
) -> None:
    """Serve the web dashboard. Without --auth-file or --access, it is read-only, and for this machine only."""
    try:
        import uvicorn  # noqa: F401, PLC0415  # every celery command imports this module

        from ..web.server import protected, serve  # noqa: PLC0415
    except ImportError as error:
        raise click.UsageError(f"the dashboard needs the extra: pip install 'celery-dlock[web]' ({error})") from error

    with session() as opened:
        made = protected(opened.app, host, auth_file, access, hosts)
    shown = f"[{host}]" if ":" in host else host
    serve(made, host, port, root_path, ready=lambda: note(f"http://{shown}:{port}{root_path}/"))
