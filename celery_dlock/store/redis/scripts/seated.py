"""The scripts of names with seats (``limit``): each runs the script of a lock on one seat.

A file ``seats/<script>.lua`` chooses the seat and then calls ``on_seat()``, the whole script of that name. So a seat is
a lock with the same rules, and the scripts of names without seats stay as they are. The command has three more keys
and one more argument. ``seats/common.lua`` explains them.
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
    SHOW_QUEUE,
    SWEEP,
    Script,
    ScriptVariant,
)
from .header import Parameter, with_parts

__all__ = ["SeatScript", "seat_command"]

#: The last key never exists. With it, a Cluster runs the script only where no key of its slot is migrating. That
#: matters, because the keys of the seats are not declared.
_KEYS: Final = (Parameter("seats"), Parameter("seat_wake"), Parameter("unmoved"))
_ARGS: Final = (Parameter("seat_limit"),)
_FOLDER: Final = resources.files(__package__).joinpath("seats")
#: Parts that several of the files share.
_SHARED: Final = ("common", "choose", "queue")


def _read(file: str) -> str:
    return _FOLDER.joinpath(f"{file}.lua").read_text("utf-8")


_PARTS: Final = {**PARTS, **{f"seats/{file}": _read(file) for file in _SHARED}}


class SeatScript(Script):
    """A script that runs another one on a seat.

    Args:
        script: The script of a lock.
    """

    __slots__ = ("_plain",)

    def __init__(self, script: Script) -> None:
        self.name = f"seats/{script.name}"
        self._plain = script
        header = script.header
        around = with_parts(_read(script.name), _PARTS)
        self._define(
            header._replace(keys=(*header.keys, *_KEYS), args=(*_ARGS, *header.args)),
            f"\nlocal function on_seat()\n{script.body}\nend\n{around}",
        )

    def variant_like(self, plain: ScriptVariant) -> ScriptVariant:
        """Return the variant with the groups of a variant of the other script."""
        present = next(present for present, variant in self._plain.variants.items() if variant is plain)
        return self.variants[present]


_PLAIN: Final = (
    ACQUIRE, ACQUIRE_QUEUED, CONFIRM_PUBLISH, DECLINE_GRANT, INSPECT, LIST_WAITERS, MARK_DONE, RELEASE, RELEASE_QUEUED,
    REMOVE_WAITER, RENEW, SHOW_QUEUE, SWEEP,
)  # fmt: skip
_SCRIPTS: Final = {script.name: SeatScript(script) for script in _PLAIN}


@functools.cache
def _variant_on_seat(plain: ScriptVariant) -> ScriptVariant:
    return _SCRIPTS[plain.name].variant_like(plain)


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
    number = len(plain.keys)
    of_seats = keys.seats_record(), keys.wake, keys.absent(), str(seats)
    return _variant_on_seat(plain), (*texts[:number], *of_seats, *texts[number:])
