"""Options, durations and groups of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from ..reports.durations import parse_duration

__all__ = ["DURATION", "JSON", "NO_HEADERS", "ListByDefault", "bulk", "formats", "listing", "option", "reason_option"]

#: The key of the context under which the option ``--no-headers`` is kept for the output.
NO_HEADERS: Final = "celery_dlock.no_headers"

F = TypeVar("F", bound=Callable[..., Any])


def option(*names: str, **facts: Any) -> Callable[[F], F]:
    """Return an option that no environment variable sets: Celery would read ``CELERY_DLOCK_...``."""
    return click.option(*names, allow_from_autoenv=False, **facts)


class _Duration(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """A duration: seconds, or a number with the unit s, m, h or d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error))


class _Json(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """A JSON value of one type."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, self._kind):
            return value
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            self.fail(f"it is no JSON: {error}")
        if not isinstance(found, self._kind):
            self.fail(f"expected a JSON {self.name}")
        return found


DURATION: Final = _Duration()
JSON: Final = {"array": _Json(list, "array"), "object": _Json(dict, "object")}


def formats(command: F) -> F:
    """Add ``--json`` and ``--jsonl``."""
    jsonl = option("--jsonl", "form", flag_value="jsonl", help="Print one JSON document per line, for long lists.")
    return option("--json", "form", flag_value="json", help="Print one JSON document.")(jsonl(command))


def listing(command: F) -> F:
    """Add the options of a list: ``--json``, ``--jsonl`` and ``--no-headers``."""
    headers = option(
        "--no-headers", is_flag=True, expose_value=False, callback=_keep_in_context,
        help="Print no line of column names, for scripts.",
    )  # fmt: skip
    return formats(headers(command))


def _keep_in_context(ctx: click.Context, _param: click.Parameter, given: bool) -> None:  # noqa: FBT001  # click calls it
    ctx.meta[NO_HEADERS] = given


#: The option ``--reason`` of an action.
reason_option: Final = option("--reason", default="", help="The reason, for the audit.")


def bulk(command: F) -> F:
    """Add the options of an action on several things."""
    for one in (
        reason_option,
        option("--dry-run", is_flag=True, help="Only print what would be done."),
        option("--yes", is_flag=True, help="Do it even if it concerns several. Otherwise their number is printed."),
    ):
        command = one(command)
    return command


class ListByDefault(click.Group):
    """A group whose command ``list`` runs if no other one is named: ``queue NAME`` is ``queue list NAME``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)
