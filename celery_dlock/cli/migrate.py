"""The command ``migrate``: the tables of an SQL store."""

from __future__ import annotations

import click

from .options import option
from .output import note
from .session import NOTHING, SETTINGS, UNAVAILABLE

__all__ = ["migrate"]


@click.command()
@option("--sql", is_flag=True, help="Print the statements for new tables, and ask no server.")
@option("--check", is_flag=True, help="Change nothing. Exit code 1 if the tables are missing or of another version.")
@click.pass_context
def migrate(ctx: click.Context, /, *, sql: bool, check: bool) -> None:
    """Create the tables of a lock store in SQL, or bring them to the version of this release.

    The user in dlock_url needs the right CREATE. For new tables, an administrator can run what --sql prints.
    """
    from ..errors import InvalidLockOptions, StoreRefused, StoreUnavailable  # noqa: PLC0415  # as in session
    from ..runtime import Runtime  # noqa: PLC0415
    from ..store.factory import open_migrator  # noqa: PLC0415

    if sql and check:
        raise click.UsageError("give one of --sql and --check")
    try:
        settings = Runtime.of(ctx.obj.app).settings
        migrator = open_migrator(settings.locations, timeout=settings.timeout)
    except InvalidLockOptions as error:
        note(f"Error: {error}")
        ctx.exit(SETTINGS)
    url = settings.locations[0].shown
    try:
        if sql:
            click.echo(migrator.text(), nl=False)
        elif check:
            migrator.check()
            note(f"{url}: the tables have the version of this release")
        else:
            done = migrator.migrate()
            note(f"{url}: {', '.join(done) if done else 'the tables already have the version of this release'}")
    except StoreUnavailable as error:
        note(f"Error: {url}: {error}")
        ctx.exit(NOTHING if check and isinstance(error, StoreRefused) else UNAVAILABLE)
