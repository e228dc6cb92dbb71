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
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["Header", "Parameter", "check_parts", "read_header", "with_parts"]

_DIRECTIVE: Final = re.compile(r"-- @(\w+) *(.*)")
_GROUP: Final = re.compile(r"([a-z]\w*)(?: requires ([a-z]\w*))? {2,}\S.*")
_PARAMETER: Final = re.compile(r"([a-z]\w*)(\.\.\.)? {2,}\S.*?(?: +\[(\w+)\])?")
_NAMES: Final = re.compile(r"[a-z][\w/]*(?: [a-z][\w/]*)*")
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
        groups: Optional groups, each with the group that it requires ("" for none).
        replies: Shapes of the replies.
    """

    keys: tuple[Parameter, ...]
    args: tuple[Parameter, ...]
    groups: dict[str, str]
    replies: tuple[str, ...]


def read_header(file: str, text: str, base: Header = Header((), (), {}, ())) -> Header:  # noqa: B008  # immutable
    """Return the declarations of a script's header, behind those of another header.

    Raises:
        ValueError: The header is malformed; the message names file and line.
    """
    groups = dict(base.groups)
    found = {"keys": list(base.keys), "args": list(base.args)}
    replies: list[str] = []
    _check_title(file, text)
    for number, directive, rest in _directives(text):
        where = f"{file}.lua:{number}"
        if directive == "group":
            name, required = _matched(_GROUP, rest, where, "<name> [requires <name>]  <meaning>").groups()
            if required and required not in groups:
                raise _invalid(where, f"group {required!r}", "a group declared above")
            groups[name] = required or ""
        elif directive in found:
            parameter = _parameter(rest, where, groups)
            _check_new(parameter, [*found["keys"], *found["args"]], found[directive], where)
            found[directive].append(parameter)
        elif directive == "reply":
            replies.append(rest)
        else:
            raise _invalid(where, f"directive @{directive}", "@group, @keys, @args or @reply")
    if not (found["keys"] and replies):
        raise _invalid(f"{file}.lua", "header", "at least one @keys and one @reply")
    return Header(tuple(found["keys"]), tuple(found["args"]), groups, tuple(replies))


def check_parts(file: str, text: str, parts: dict[str, str], header: Header) -> None:
    """Check that each part that a script includes exists, and that the script provides what the part uses.

    Args:
        file: Name of the script, for errors.
        text: Text of the script.
        parts: Texts of the files in ``lib/``, and of those that the files in ``seats/`` share, by name.
        header: Declarations of the script.

    Raises:
        ValueError: A part, a name or an earlier part is missing; the message names part and script.
    """
    used = [part for match in _INCLUDE.finditer(text) for part in match.group(1).split()]
    for index, part in enumerate(used):
        if part not in parts or part in used[:index]:
            raise ValueError(f"invalid Lua file: {file}.lua: @include {part}: expected a part of lib/, once")
        _check_part(part, parts[part], header, used[:index], file)


def _check_part(part: str, text: str, header: Header, earlier: list[str], file: str) -> None:
    path = part if "/" in part else f"lib/{part}"
    _check_title(path, text)
    provided = {"uses": {p.name for p in (*header.keys, *header.args)} | header.groups.keys(), "after": set(earlier)}
    for number, directive, rest in _directives(text):
        where = f"{path}.lua:{number}"
        if directive not in provided:
            raise _invalid(where, f"directive @{directive}", "@uses or @after")
        wanted = set(_matched(_NAMES, rest, where, "names with one space between them").group().split())
        if missing := sorted(wanted - provided[directive]):
            raise _invalid(
                where, f"{file}.lua lacks {', '.join(missing)}", f"a script with all that @{directive} names"
            )


def with_parts(text: str, parts: dict[str, str]) -> str:
    """Return a script's text with its parts in place of the ``@include`` lines."""
    return _INCLUDE.sub(lambda match: "\n".join(parts[part] for part in match.group(1).split()), text)


def _directives(text: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("--"):
            return
        if match := _DIRECTIVE.fullmatch(line):
            yield number, match.group(1), match.group(2).strip()


def _check_title(file: str, text: str) -> None:
    if not text.startswith(f"-- {file}: "):
        raise _invalid(f"{file}.lua:1", repr(text.partition("\n")[0]), f"'-- {file}: <purpose>'")


def _parameter(rest: str, where: str, groups: dict[str, str]) -> Parameter:
    shape = "<name>  <meaning> [group], with two spaces after the name"
    name, variadic, group = _matched(_PARAMETER, rest, where, shape).groups()
    if group and group not in groups:
        raise _invalid(where, f"group {group!r}", "a group declared above with @group")
    return Parameter(name, group or "", bool(variadic))


def _check_new(parameter: Parameter, known: list[Parameter], alike: list[Parameter], where: str) -> None:
    if parameter.name in {one.name for one in known}:
        raise _invalid(where, f"second {parameter.name!r}", "each name once")
    if alike and alike[-1].variadic:
        raise _invalid(where, repr(parameter.name), f"nothing after {alike[-1].name}...")


def _matched(pattern: re.Pattern[str], text: str, where: str, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise _invalid(where, repr(text), expected)
    return match


def _invalid(where: str, found: str, expected: str) -> ValueError:
    return ValueError(f"invalid Lua header: {where}: {found}: expected {expected}")
