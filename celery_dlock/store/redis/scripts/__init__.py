"""The Lua scripts, one verb each, packed for the wire.

``grant.lua`` is a part of those that can free a lock, ``mark.lua`` of those that know what became of a name's last run,
``probation.lua`` of those that know whether a server grants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Final

__all__ = [
    "ACQUIRE",
    "AGREE",
    "CLAIM",
    "DONE",
    "DUE",
    "ENTER_OFFICE",
    "FORGET",
    "INSPECT",
    "KEEP_CLAIM",
    "NOTE",
    "PASS_ON",
    "PUBLISHED",
    "RELEASE",
    "RENEW",
    "RESOLVE",
    "SWEEP",
    "SWEEP_LEASE",
    "TAKE_OUT",
    "UNCLAIM",
    "USE",
    "WAITING",
    "Script",
]


class _Lengths(dict[int, str]):
    """The line before a text, by the text's length; those of most texts are at hand."""

    def __missing__(self, length: int) -> str:
        return f"${length}"


_LENGTHS: Final = _Lengths({length: f"${length}" for length in range(256)})


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Script:
    """One script and its prepared command heads.

    redis-py's general packer takes longer than the rest of a call together, so the constant part is packed once.

    Args:
        name: Of the verb's file.
        parts: Files of functions that it uses: Redis' scripts cannot call one another.
    """

    __slots__ = ("_eval", "_evalsha", "_heads", "name", "sha", "source")

    def __init__(self, name: str, *parts: str) -> None:
        self.name = name
        files = resources.files(__name__)
        verb, *used = (files.joinpath(f"{file}.lua").read_bytes() for file in (name, *parts))
        # At this line, or first where there is none: a script makes its functions anew each time it runs, and most runs
        # of those that matter need none.
        before, line, after = verb.rpartition(b"-- parts\n")
        self.source = b"\n".join([before, *used, after] if line else [*used, verb])
        # Redis names a script by its SHA-1; this is an address, not a safeguard.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self._evalsha = _bulk(b"EVALSHA") + _bulk(self.sha.encode())
        self._eval = _bulk(b"EVAL") + _bulk(self.source)
        #: What stands before the texts, without its last line's end, by the numbers of keys and arguments.
        self._heads: dict[tuple[int, int], str] = {}

    def packed(self, keys: Sequence[str], args: Sequence[str], *, whole: bool = False) -> bytes:
        """The command for the wire: by digest, or (``whole``) with the text, which also loads it."""
        texts = (*keys, *args)
        if not whole:
            # As much as can be in one step of the interpreter: these steps are most of what a task pays for its lock.
            shape = len(keys), len(args)
            lines = [""] * (2 * len(texts) + 2)
            lines[0] = self._heads.get(shape) or self._known_head(*shape)
            lines[1:-1:2] = map(_LENGTHS.__getitem__, map(len, texts))
            lines[2:-1:2] = texts
            command = "\r\n".join(lines)
            if command.isascii():
                return command.encode()
        said = b"".join([_bulk(text.encode("utf-8", "surrogatepass")) for text in texts])
        return self._head(self._eval if whole else self._evalsha, len(keys), len(args)) + said

    def _head(self, verb: bytes, keys: int, args: int) -> bytes:
        return b"*%d\r\n%b%b" % (3 + keys + args, verb, _bulk(b"%d" % keys))

    def _known_head(self, keys: int, args: int) -> str:
        # What is asked for has few shapes, so this stays small.
        head = self._heads[keys, args] = self._head(self._evalsha, keys, args).decode().removesuffix("\r\n")
        return head


ACQUIRE = Script("acquire", "grant", "mark", "probation")
ENTER_OFFICE = Script("enter_office", "probation")
AGREE = Script("agree", "mark")
RENEW = Script("renew")
RELEASE = Script("release", "grant", "mark")
INSPECT = Script("inspect", "grant")
SWEEP = Script("sweep", "grant")
SWEEP_LEASE = Script("sweep_lease")
PASS_ON = Script("pass_on")
PUBLISHED = Script("published", "grant")
TAKE_OUT = Script("take_out", "grant")
WAITING = Script("waiting")
DONE = Script("done")
DUE = Script("due")
NOTE = Script("note")
USE = Script("use", "mark")
FORGET = Script("forget", "mark")
RESOLVE = Script("resolve", "mark")
CLAIM = Script("claim")
UNCLAIM = Script("unclaim")
KEEP_CLAIM = Script("keep_claim")
