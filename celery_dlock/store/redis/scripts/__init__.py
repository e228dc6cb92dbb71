"""The Lua scripts, one file per operation, packed as RESP commands.

:mod:`.header` documents the header of a file. A script has one variant per set of optional groups. Each variant has a
fixed layout, its own text, SHA-1 and command head.

A new script also needs a method in :mod:`..store` and in the contract (:mod:`...base`). If its reply is more than a
number, it needs a reader in :mod:`..replies`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Final

from .header import Header, Parameter, read_header, with_parts

__all__ = ["PARTS", "SCRIPTS", "Script", "ScriptVariant", "lua_files"]


class _Lengths(dict[int, str]):
    """The RESP line that precedes a text, by the text's length. The lines of common lengths are built in advance."""

    def __missing__(self, length: int) -> str:
        return f"${length}"


_LENGTH_LINE: Final = _Lengths({length: f"${length}" for length in range(256)}).__getitem__
# Positions of the length lines and of the texts among the lines of a packed command.
_LENGTHS, _TEXTS = slice(1, -1, 2), slice(2, -1, 2)


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class ScriptVariant:
    """A script with one set of its optional groups: text, SHA-1, and prepared command heads.

    The constant part is packed once: redis-py's general packer would take longer than the rest of a call.

    Args:
        name: Name of the script.
        body: Text of its file, with the included parts.
        keys: Keys that this variant takes.
        args: Arguments that this variant takes.
        prologue: Generated Lua locals.
    """

    __slots__ = ("_eval", "_evalsha", "_layouts", "args", "keys", "name", "sha", "source")

    def __init__(
        self, name: str, body: str, keys: Sequence[Parameter], args: Sequence[Parameter], prologue: str
    ) -> None:
        self.name = name
        self.keys = tuple(key.name for key in keys)
        self.args = tuple(arg.name for arg in args)
        # The prologue adds no line, so the line numbers in the server's error messages are those of the file.
        self.source = f"{prologue} {body}".encode()
        # Redis identifies a script by its SHA-1. The hash is not used for security.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self._evalsha = _bulk(b"EVALSHA") + _bulk(self.sha.encode())
        self._eval = _bulk(b"EVAL") + _bulk(self.source)
        self._layouts = _Layouts(self, keys, args)

    def packed(self, texts: Sequence[str], *, whole: bool = False) -> bytes:
        """Return the packed command.

        Args:
            texts: Keys and arguments, in the order of the header.
            whole: Send the script's text, which also loads it, instead of its SHA-1.
        """
        lines = self._layouts[len(texts)].copy()
        if not whole:
            # Keep the number of interpreter steps low: they are most of what a lock costs a task.
            lines[_LENGTHS] = map(_LENGTH_LINE, map(len, texts))
            lines[_TEXTS] = texts
            command = "\r\n".join(lines)
            if command.isascii():
                return command.encode()
        bulks = b"".join([_bulk(text.encode("utf-8", "surrogatepass")) for text in texts])
        return self.head(len(texts), whole=whole) + bulks

    def head(self, count: int, *, whole: bool = False) -> bytes:
        """Return the start of a command that has ``count`` keys and arguments."""
        verb = self._eval if whole else self._evalsha
        return b"*%d\r\n%b%b" % (3 + count, verb, _bulk(b"%d" % self._layouts.number_of_keys(count)))


class _Layouts(dict[int, list[str]]):
    """The lines of a packed command with empty texts, by the number of texts.

    A variant without variadic parameters has one layout. Any other number of texts is an error of the caller.
    """

    def __init__(self, variant: ScriptVariant, keys: Sequence[Parameter], args: Sequence[Parameter]) -> None:
        super().__init__()
        self._variant = variant
        self._keys, self._args = len(keys), len(args)
        self._variadic_keys = any(key.variadic for key in keys)
        self._variadic = self._variadic_keys or any(arg.variadic for arg in args)
        if self._variadic_keys and any(arg.variadic for arg in args):
            raise ValueError(f"invalid Lua header: {variant.name}.lua: expected variadic keys or arguments, not both")

    def __missing__(self, count: int) -> list[str]:
        if not self._variadic and count != self._keys + self._args:
            raise ValueError(
                f"invalid call of {self._variant.name}.lua: {count} texts: expected {self._keys} keys and "
                f"{self._args} arguments"
            )
        head = self._variant.head(count).decode().removesuffix("\r\n")
        layout = self[count] = [head, *[""] * (2 * count + 1)]
        return layout

    def number_of_keys(self, count: int) -> int:
        return count - self._args if self._variadic_keys else self._keys


class _Variants(dict[tuple[bool, ...], ScriptVariant]):
    """The variants of a script, by the presence of each group in the header's order. Each is built on first use."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def __missing__(self, present: tuple[bool, ...]) -> ScriptVariant:
        variant = self[present] = self._script.build(dict(zip(self._script.groups, present, strict=True)))
        return variant


class Script:
    """One operation, with the keys, arguments and groups that the header of its file declares.

    Args:
        name: Name of the file, without its suffix.
        header: Declarations of the file.
        body: Text of the file, with its parts.
    """

    __slots__ = ("args", "body", "groups", "header", "keys", "name", "variants")

    def __init__(self, name: str, header: Header, body: str) -> None:
        self.name, self.header, self.body = name, header, body
        self.keys, self.args, self.groups = header
        #: Variants by the presence of each group, in the header's order.
        self.variants = _Variants(self)

    def variant(self, *groups: str) -> ScriptVariant:
        """Return the variant that has these groups and no others."""
        if unknown := set(groups) - set(self.groups):
            raise ValueError(f"invalid group of {self.name}.lua: {unknown}: expected {self.groups}")
        return self.variants[tuple(group in groups for group in self.groups)]

    def build(self, present: dict[str, bool]) -> ScriptVariant:
        """Return a new variant. Use :attr:`variants`, which keeps them."""
        keys = [key for key in self.keys if not key.group or present[key.group]]
        args = [arg for arg in self.args if not arg.group or present[arg.group]]
        absent = [one.name for one in (*self.keys, *self.args) if one.group and not present[one.group]]
        # acquire.lua and release.lua use this local on the path of most calls. It saves two look-ups per command.
        lines = ["local call = redis.call", *_assigned("KEYS", keys), *_assigned("ARGV", args)]
        if absent:
            lines.append(f"local {', '.join(absent)}")
        if present:
            flags = ", ".join(str(flag).lower() for flag in present.values())
            lines.append(f"local {', '.join(present).upper()} = {flags}")
        return ScriptVariant(self.name, self.body, keys, args, " ".join(lines))


def _assigned(table: str, parameters: Sequence[Parameter]) -> Iterator[str]:
    """Yield the Lua statements that give parameters their names."""
    fixed = [one.name for one in parameters if not one.variadic]
    if len(fixed) == 1:
        yield f"local {fixed[0]} = {table}[1]"
    elif fixed:
        # Index the table for each name: `unpack` takes longer. The local saves a look-up of the global for each name.
        values = ", ".join(f"{table}[{number}]" for number in range(1, len(fixed) + 1))
        yield f"local {table} = {table} local {', '.join(fixed)} = {values}"
    for one in parameters:
        if one.variadic:
            yield (
                f"local {one.name} = {{unpack({table}, {len(fixed) + 1})}}" if fixed else f"local {one.name} = {table}"
            )


def lua_files(folder: str) -> dict[str, str]:
    """Return the texts of the Lua files in a folder of this package, by the name of the file."""
    files = sorted(resources.files(__name__).joinpath(folder).iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".lua"): file.read_text("utf-8") for file in files if file.name.endswith(".lua")}


PARTS: Final = lua_files("lib")
SCRIPTS: Final = {
    name: Script(name, read_header(name, text), with_parts(text, PARTS)) for name, text in lua_files("").items()
}
