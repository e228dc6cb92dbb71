"""The scripts of names with seats (``limit``): each runs the script of a lock on one seat.

A file ``seats/<script>.lua`` chooses the seat and then calls ``on_seat()``, the whole script of that name. So a seat is
a lock with the same rules, and the scripts of names without seats stay as they are. ``seats/common.lua`` explains the
seats, and which keys and arguments a command has in addition to those of that script.
"""

from __future__ import annotations

from typing import Final

from . import PARTS, SCRIPTS, Script, lua_files
from .header import Parameter, read_header, with_parts

__all__ = ["SEAT_SCRIPTS", "SHARED_PARTS"]

_FILES: Final = lua_files("seats")
#: Parts that several of the files share, by their path.
SHARED_PARTS: Final = {f"seats/{name}": text for name, text in _FILES.items() if name not in SCRIPTS}
_PARTS: Final = {**PARTS, **SHARED_PARTS}


#: What each file has in addition, as ``seats/common.lua`` says.
_OWN_KEYS, _SEAT_LIMIT = (Parameter("seats"), Parameter("absent")), Parameter("seat_limit")


def _on_seat(name: str, text: str) -> Script:
    """Return the script that runs another one on a seat."""
    plain = SCRIPTS[name]
    more = tuple(key for key in _OWN_KEYS if key not in plain.keys)
    header = plain.header._replace(keys=(*plain.keys, *more), args=(_SEAT_LIMIT, *plain.args))
    body = f"\nlocal function on_seat(...)\n{plain.body}\nend\n{with_parts(text, _PARTS)}"
    return Script(f"seats/{name}", read_header(f"seats/{name}", text, header), body)


#: The scripts by the name of the script of a lock.
SEAT_SCRIPTS: Final = {name: _on_seat(name, text) for name, text in _FILES.items() if name in SCRIPTS}
