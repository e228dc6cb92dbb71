"""The wire version: a number for the format of what workers of different versions share.

It grows with each change that an older worker would misread. A new field that an older worker may ignore does not
change it. A worker leaves alone what carries a higher number than its own: a newer worker reads it. The format is
described in docs/contributing/wire-format.md.
"""

from __future__ import annotations

from typing import Final, TypeGuard

__all__ = ["FIELD", "WIRE_VERSION", "NewerWireVersion", "is_newer", "reject_newer"]

WIRE_VERSION: Final = 1
#: The field of a header, of a parked message and of a worker's answer that carries the number.
FIELD: Final = "wire"


class NewerWireVersion(ValueError):
    """The text was written by a worker of a newer wire version, so this one cannot read it.

    Args:
        version: Its wire version.
    """

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version

    def __str__(self) -> str:
        return f"it has wire version {self.version}, and this celery-dlock reads versions up to {WIRE_VERSION}"


def is_newer(version: object) -> TypeGuard[int]:
    """Return whether it is the number of a newer wire version. Anything that is no whole number counts as 1."""
    return type(version) is int and version > WIRE_VERSION


def reject_newer(version: object) -> None:
    """Raise :class:`NewerWireVersion` if it is the number of a newer wire version."""
    if is_newer(version):
        raise NewerWireVersion(version)
