"""The scripts of names with seats (``limit``): each runs the script of a lock on one seat.

A file ``seats/<script>.lua`` chooses the seat and then calls ``on_seat()``, the whole script of that name. So a seat is
a lock with the same rules, and the scripts of names without seats stay as they are. The command has the keys and the
arguments of that script, and those that the header of the file declares. The keys of the file follow the others. Its
argument precedes them. ``seats/common.lua`` explains the seats.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Final

from ....keys.lock_name import ONE_SEAT
from ..keys import LockKeys
from . import (
    ACQUIRE,
    ACQUIRE_QUEUED,
    CONFIRM_PUBLISH,
    DECLINE_GRANT,
    INSPECT,
    LIST_WAITERS,
    MARK_DONE,
    PARTS,
    RELEASE,
    RELEASE_QUEUED,
    REMOVE_WAITER,
    RENEW,
    SWEEP,
    Script,
    ScriptVariant,
)
from .header import check_parts, read_header, with_parts

__all__ = ["SEAT_SCRIPTS", "SHARED_PARTS", "SeatScript", "seat_command"]

_FOLDER: Final = resources.files(__package__).joinpath("seats")


def _read(file: str) -> str:
    return _FOLDER.joinpath(f"{file}.lua").read_text("utf-8")


#: Parts that several of the files share, by their path.
SHARED_PARTS: Final = {f"seats/{file}": _read(file) for file in ("common", "choose", "queue")}
_PARTS: Final = {**PARTS, **SHARED_PARTS}


class SeatScript(Script):
    """A script that runs another one on a seat.

    Raises :class:`ValueError` for a header or an ``@include`` that is malformed.

    Args:
        script: The script of a lock.
    """

    __slots__ = ("_plain", "own")

    def __init__(self, script: Script) -> None:
        self.name = f"seats/{script.name}"
        self._plain = script
        text, plain = _read(script.name), script.header
        #: What its own header declares.
        self.own = read_header(self.name, text)
        keys, args = (*plain.keys, *self.own.keys), (*self.own.args, *plain.args)
        header = plain._replace(keys=keys, args=args, replies=self.own.replies)
        check_parts(self.name, text, _PARTS, header)
        self._define(header, f"\nlocal function on_seat(...)\n{script.body}\nend\n{with_parts(text, _PARTS)}")

    def variant_like(self, plain: ScriptVariant) -> ScriptVariant:
        """Return the variant with the groups of a variant of the other script."""
        present = next(present for present, variant in self._plain.variants.items() if variant is plain)
        return self.variants[present]


_PLAIN: Final = (
    ACQUIRE, ACQUIRE_QUEUED, CONFIRM_PUBLISH, DECLINE_GRANT, INSPECT, LIST_WAITERS, MARK_DONE, RELEASE, RELEASE_QUEUED,
    REMOVE_WAITER, RENEW, SWEEP,
)  # fmt: skip
#: The scripts by the name of the script of a lock.
SEAT_SCRIPTS: Final = {script.name: SeatScript(script) for script in _PLAIN}


@functools.cache
def _variant_on_seat(plain: ScriptVariant) -> ScriptVariant:
    return SEAT_SCRIPTS[plain.name].variant_like(plain)


def seat_command(
    command: tuple[ScriptVariant, tuple[str, ...]], keys: LockKeys, seats: int
) -> tuple[ScriptVariant, tuple[str, ...]]:
    """Return a command for one seat, instead of the command for a name that is one lock.

    Args:
        command: The command of a script that has a file in ``seats/``.
        keys: Keys of the name.
        seats: ``LockName.seats``.
    """
    if seats == ONE_SEAT:
        return command
    plain, texts = command
    number, variant = len(plain.keys), _variant_on_seat(plain)
    of_seats = {"seats": keys.seats_record(), "seat_wake": keys.wake, "absent": keys.absent()}
    own_keys = (of_seats[key] for key in variant.keys[number:])
    return variant, (*texts[:number], *own_keys, str(seats), *texts[number:])
