"""The Lua scripts, one verb each, packed for the wire. ``grant.lua`` is a part of those that can free a lock."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources

__all__ = [
    "ACQUIRE",
    "DUE",
    "INSPECT",
    "PUBLISHED",
    "RELEASE",
    "RENEW",
    "SWEEP",
    "TAKE_OUT",
    "WAITING",
    "Script",
]


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class Script:
    """One script and its prepared command heads.

    redis-py's general packer takes longer than the rest of a call together, so the constant part is packed once.

    Args:
        name: Of the verb's file.
        parts: Files of functions that it uses: Redis' scripts cannot call one another.
    """

    __slots__ = ("_eval", "_evalsha", "name", "sha", "source")

    def __init__(self, name: str, *parts: str) -> None:
        self.name = name
        files = resources.files(__name__)
        self.source = b"\n".join([files.joinpath(f"{file}.lua").read_bytes() for file in (*parts, name)])
        # Redis names a script by its SHA-1; this is an address, not a safeguard.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self._evalsha = _bulk(b"EVALSHA") + _bulk(self.sha.encode())
        self._eval = _bulk(b"EVAL") + _bulk(self.source)

    def packed(self, keys: Sequence[str], args: Sequence[str], *, whole: bool = False) -> bytes:
        """The command for the wire: by digest, or (``whole``) with the text, which also loads it."""
        count = len(keys)
        head = b"*%d\r\n%b$%d\r\n%d\r\n" % (
            3 + count + len(args),
            self._eval if whole else self._evalsha,
            len(str(count)),
            count,
        )
        texts = (*keys, *args)
        tail = "".join([f"${len(text)}\r\n{text}\r\n" for text in texts])
        if tail.isascii():
            return head + tail.encode()
        return head + b"".join([_bulk(text.encode("utf-8", "surrogatepass")) for text in texts])


ACQUIRE = Script("acquire", "grant")
RENEW = Script("renew")
RELEASE = Script("release", "grant")
INSPECT = Script("inspect", "grant")
SWEEP = Script("sweep", "grant")
PUBLISHED = Script("published", "grant")
TAKE_OUT = Script("take_out", "grant")
WAITING = Script("waiting")
DUE = Script("due")
