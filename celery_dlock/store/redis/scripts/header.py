"""Headers of the Lua scripts: the comments that declare a script's keys, arguments and replies.

A header is the comment block at the top of a file. Its first line is ``-- <file>: <purpose>``. Directives::

    -- @group <name> [requires <name>]  <when it is present>
    -- @keys <name>  <meaning> [group]
    -- @args <name>  <meaning> [group]
    -- @reply <shape>  <meaning>

A key or argument with a group is sent only in variants that have the group. ``<name>...`` takes all remaining keys or
arguments. No key or argument, respectively, may follow it. Other comment lines are for readers.

A file in ``seats/`` declares the replies, and keys that neither the script of a lock nor all such files have
(:mod:`.seated`).

A part in ``lib/`` has no keys of its own. It declares what the including script must provide::

    -- @uses <name> <name> ...      keys, arguments and groups of the script
    -- @after <part> <part> ...     parts that the script includes before this one

The unit tests hold each file to these rules. Here only what a command needs is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["Header", "Parameter", "directives", "read_header", "with_parts"]

_DIRECTIVE: Final = re.compile(r"-- @(\w+) *(.*)")
_GROUP: Final = re.compile(r"([a-z]\w*)(?: requires [a-z]\w*)? {2,}\S.*")
_PARAMETER: Final = re.compile(r"([a-z]\w*)(\.\.\.)? {2,}\S.*?(?: +\[(\w+)\])?")
_INCLUDE: Final = re.compile(r"^ *-- @include (.*)$", re.MULTILINE)


class Parameter(NamedTuple):
    """A key or an argument of a script.

    Args:
        name: Name of the Lua local.
        group: Group whose variants send it; "" if every variant does.
        variadic: It takes all remaining keys or arguments, as a Lua table.
    """

    name: str
    group: str = ""
    variadic: bool = False


class Header(NamedTuple):
    """The declarations of a script's header.

    Args:
        keys: Keys, in the order in which they are sent.
        args: Arguments, in the order in which they are sent.
        groups: Names of the optional groups.
    """

    keys: tuple[Parameter, ...] = ()
    args: tuple[Parameter, ...] = ()
    groups: tuple[str, ...] = ()


def read_header(file: str, text: str, base: Header = Header()) -> Header:  # noqa: B008  # immutable
    """Return the declarations of a script's header, behind those of another header.

    Raises:
        ValueError: A line is malformed; the message names file and line.
    """
    found = {"keys": [*base.keys], "args": [*base.args]}
    groups = [*base.groups]
    for number, directive, rest in directives(text):
        where = f"{file}.lua:{number}"
        if directive == "group":
            groups.append(_matched(_GROUP, rest, where, "<name> [requires <name>]  <meaning>")[1])
        elif directive in found:
            shape = "<name>  <meaning> [group], with two spaces after the name"
            name, variadic, group = _matched(_PARAMETER, rest, where, shape).groups()
            found[directive].append(Parameter(name, group or "", bool(variadic)))
    return Header(tuple(found["keys"]), tuple(found["args"]), tuple(groups))


def with_parts(text: str, parts: dict[str, str]) -> str:
    """Return a script's text with its parts in place of the ``@include`` lines."""
    return _INCLUDE.sub(lambda match: "\n".join(parts[part] for part in match.group(1).split()), text)


def directives(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the name and the rest of each directive in a header."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("--"):
            return
        if match := _DIRECTIVE.fullmatch(line):
            yield number, match.group(1), match.group(2).strip()


def _matched(pattern: re.Pattern[str], text: str, where: str, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"invalid Lua header: {where}: {text!r}: expected {expected}")
    return match
