"""The form of a lock name: readable parts, a digest that is different for every name, and the bucket.

:mod:`.key_spec` decides which name a call gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, NamedTuple

from ..errors import LockKeyError
from .canonical import text_form, utf8

__all__ = [
    "BUCKETS",
    "ONE_LOCK",
    "ONE_SEAT",
    "UNKNOWN_SEATS",
    "LockName",
    "escape",
    "idempotency_key",
    "index_member",
    "name_builder",
    "name_from_member",
    "name_from_text",
    "not_text",
    "one_seat",
    "shared_name",
    "split_seat",
    "task_of_name",
]

#: Part of the wire format: workers that disagree on it would not exclude one another.
BUCKETS: Final = 1024
#: ``LockName.seats`` of a name that is one lock.
ONE_LOCK: Final = 1
#: ``LockName.seats`` of a name with seats whose number only the store knows.
UNKNOWN_SEATS: Final = 0
#: ``LockName.seats`` of the name of one seat: a lock name, a colon and the number of the seat. Operators use it.
ONE_SEAT: Final = -1

_SHOWN_LENGTH: Final = 100
_SAFE: Final = re.compile(r"[A-Za-z0-9_.@=,/+:-]*")
_UNSAFE_BYTE: Final = re.compile(rb"[^A-Za-z0-9_.@=,/+:-]")
#: A lock name, perhaps with the number of a seat: seat 0 has the name itself.
_DIGEST: Final = re.compile(r"\A[!-~]+:([0-9a-f]{32})(:[1-9][0-9]?)?\Z")
#: The end of a name with seats in an index, which tells the reader to look at every seat. No name contains ``*``.
_EVERY_SEAT: Final = ":*"
_CUT_ESCAPE: Final = re.compile(r"%[0-9A-F]?\Z")


class LockName(NamedTuple):
    """A lock name: readable parts, followed by a digest that is different for every name.

    Args:
        text: ASCII without spaces or braces, at most 234 characters.
        bucket: The top ten bits of the digest.
        seats: The number of calls that may hold the name at once, as the caller knows it (``limit``), or ``ONE_LOCK``,
            ``UNKNOWN_SEATS`` or ``ONE_SEAT``.
    """

    text: str
    bucket: int
    seats: int = ONE_LOCK

    def __str__(self) -> str:
        return self.text


def task_of_name(name: LockName) -> str:
    """Return the name of the task whose lock this is; another text if it has a shared key, or is no task's lock."""
    return name.text.partition(":")[0]


def name_builder(*parts: str) -> Callable[[str, bytes], LockName]:
    """Return a function that makes lock names of one kind from the readable text and the forms to hash.

    Args:
        parts: What kind of name this is. They are hashed here, once, and all forms behind them.
    """
    start = blake2b(b"[%b]" % b"".join(map(text_form, parts)), digest_size=16)

    def name(shown: str, forms: bytes) -> LockName:
        digest = start.copy()
        digest.update(forms)
        hexadecimal = digest.hexdigest()
        return LockName(f"{shown}:{hexadecimal}", int(hexadecimal[:3], 16) >> 2)

    return name


def name_from_text(text: str) -> LockName:
    """Return the lock name with this text, as logs and events show it. It may name one seat (``limit``).

    Raises:
        LockKeyError: The text does not end with a digest, so it is no lock name.
    """
    digest = _DIGEST.search(text)
    if digest is None:
        raise LockKeyError(
            f"invalid lock name {text[:_SHOWN_LENGTH]!r}: expected readable text, a colon and 32 hexadecimal digits, "
            "as in logs and events"
        )
    return LockName(text, int(digest[1][:3], 16) >> 2, ONE_SEAT if digest[2] else ONE_LOCK)


def one_seat(name: LockName, seat: int) -> LockName:
    """Return the name of a seat above 0 (``limit``). Seat 0 has the lock name itself."""
    return LockName(f"{name.text}:{seat}", name.bucket, ONE_SEAT)


def split_seat(name: LockName) -> tuple[str, int]:
    """Return the text that all seats of a name share, and the seat that the name is of; 0 unless it is of one seat."""
    if name.seats != ONE_SEAT:
        return name.text, 0
    text, _, seat = name.text.rpartition(":")
    return text, int(seat)


def index_member(text: str, seats: int) -> str:
    """Return the text by which an index of the store names a lock name."""
    return text if seats == ONE_LOCK else text + _EVERY_SEAT


def name_from_member(member: str, bucket: int) -> LockName:
    """Return the lock name that an index names by this text."""
    if member.endswith(_EVERY_SEAT):
        return LockName(member.removesuffix(_EVERY_SEAT), bucket, UNKNOWN_SEATS)
    return LockName(member, bucket)


def idempotency_key(name: str, seed: str) -> str:
    """Return the key by which a gateway recognises a repeated request; "" if there is no seed."""
    return blake2b(f"{name}\n{seed}".encode(), digest_size=16).hexdigest() if seed else ""


def escape(text: str) -> str:
    """The text as a name shows it: escaped, so that it is ASCII without spaces and braces, and cut."""
    shown = text[:_SHOWN_LENGTH]
    if _SAFE.fullmatch(shown):
        return shown
    escaped = _UNSAFE_BYTE.sub(lambda match: b"%%%02X" % ord(match[0]), utf8(shown)).decode()
    return _CUT_ESCAPE.sub("", escaped[:_SHOWN_LENGTH])


def not_text(value: object) -> str:
    """Return a description of a value that is no non-empty string; "" if it is one."""
    if isinstance(value, str):
        return "" if value else "empty text"
    return f"a value of type {type(value).__name__}"


_shared_text: Final = name_builder("shared", "text")


def shared_name(text: str) -> LockName:
    """The name of ``Lock(text)``, and of every ``scope="shared"`` task whose template or callable gives this text.

    The text alone is hashed, not the fields that it was made of: a ``Lock`` knows no fields. So two templates may meet
    in one text and exclude each other, which is the safe direction. Raises ``LockKeyError`` unless it is a non-empty
    string.
    """
    if wrong := not_text(text):
        raise LockKeyError(f"the name of a shared lock is a non-empty str, not {wrong}")
    return _shared_text(escape(text), text_form(text))
