"""The scripts of names with seats (``limit``): each runs the script of a lock on one seat.

A file ``seats/<script>.lua`` chooses the seat and then calls ``on_seat()``, the whole script of that name. So a seat is
a lock with the same rules, and the scripts of names without seats stay as they are. ``seats/common.lua`` explains the
seats, and which keys and arguments a command has in addition to those of that script.
"""

from __future__ import annotations

from typing import Final

from . import PARTS, SCRIPTS, Script, lua_files
from .header import Parameter, check_parts, read_header, with_parts

__all__ = ["SEAT_SCRIPTS", "SHARED_PARTS", "SeatScript"]

_FILES: Final = lua_files("seats")
#: Parts that several of the files share, by their path.
SHARED_PARTS: Final = {f"seats/{name}": text for name, text in _FILES.items() if name not in SCRIPTS}
_PARTS: Final = {**PARTS, **SHARED_PARTS}


#: What each file has in addition, as ``seats/common.lua`` says.
_OWN_KEYS, _SEAT_LIMIT = (Parameter("seats"), Parameter("absent")), Parameter("seat_limit")


class SeatScript(Script):
    """A script that runs another one on a seat.

    Raises :class:`ValueError` for a header or an ``@include`` that is malformed.

    Args:
        script: The script of a lock.
    """

    __slots__ = ()

    def __init__(self, script: Script) -> None:
        self.name = f"seats/{script.name}"
        text, plain = _FILES[script.name], script.header
        more = tuple(key for key in _OWN_KEYS if key not in plain.keys)
        header = plain._replace(keys=(*plain.keys, *more), args=(_SEAT_LIMIT, *plain.args))
        header = read_header(self.name, text, header)
        check_parts(self.name, text, _PARTS, header)
        self._define(header, f"\nlocal function on_seat(...)\n{script.body}\nend\n{with_parts(text, _PARTS)}")


#: The scripts by the name of the script of a lock.
SEAT_SCRIPTS: Final = {name: SeatScript(SCRIPTS[name]) for name in _FILES if name in SCRIPTS}
