"""How many servers have to confirm a write before it counts (``durability=``): read, checked, said, judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ..errors import InvalidLockOptions, NotConfirmed
from .validation import invalid_value, seconds_within

__all__ = [
    "PRIMARY",
    "Durability",
    "durability_of",
    "has_room",
    "highest",
    "number_of",
    "numbered",
    "shortfall",
    "shown",
    "words",
]


class Durability(NamedTuple):
    """Who has to confirm a write, beside the primary that carries it out.

    Args:
        replicas: How many of them.
        fsync: The primary, and so many replicas, have written it to disk.
        timeout_ms: Milliseconds that they may take.
    """

    replicas: int = 0
    fsync: bool = False
    timeout_ms: int = 0


PRIMARY: Final = Durability()

#: Seconds that a write waits for its confirmations where its author named none. A replica says once a second what it
#: has written to disk, and under ``appendfsync everysec`` a primary writes as often.
DEFAULT_TIMEOUT, DEFAULT_DISK_TIMEOUT = 0.5, 1.5
#: Replicas that can be asked for: as many as a slot's word has room for, and more than anybody has.
MOST: Final = 1000
_LEAST: Final = 0.001
_ALLOWED: Final = (
    "'primary', {'replicas': n, 'timeout': s}, {'fsync': 'local', 'timeout': s} or {'fsync': n, 'timeout': s}, "
    f"n a whole number from 1 to {MOST}, the timeout optional"
)


def durability_of(option: str, value: object) -> Durability:
    """What a user asked for.

    Raises:
        InvalidLockOptions: It is none of what is allowed.
    """
    if value == "primary":
        return PRIMARY
    if not isinstance(value, Mapping) or len(value.keys() - {"timeout"}) != 1:
        raise invalid_value(option, value, _ALLOWED)
    default = DEFAULT_DISK_TIMEOUT if "fsync" in value else DEFAULT_TIMEOUT
    timeout = seconds_within(f"{option}: timeout", value.get("timeout", default), _LEAST, 30.0)
    timeout_ms = max(1, round(timeout * 1000))  # WAIT takes 0 for "without end"
    if value.get("fsync") == "local":
        return Durability(0, fsync=True, timeout_ms=timeout_ms)
    count = value.get("replicas", value.get("fsync"))
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST:
        raise invalid_value(option, value, _ALLOWED)
    return Durability(count, "fsync" in value, timeout_ms)


def _pause_of(durability: Durability, patience: float) -> int:
    """Milliseconds that a server may wait, of the ``patience`` s that a connection waits for its answer."""
    return max(1, min(durability.timeout_ms, int(patience * 500)))


def has_room(option: str, durability: Durability, timeout: float) -> None:
    """Check that a write can wait for its confirmations within ``dlock_timeout``.

    Raises:
        InvalidLockOptions: It cannot.
    """
    seconds = durability.timeout_ms / 1000
    if seconds > timeout / 2:
        raise InvalidLockOptions(
            f"{option}: timeout={seconds:g} is not allowed; allowed: seconds up to half of dlock_timeout "
            f"({timeout:g}), within which the server has to answer; or a longer dlock_timeout"
        )


def words(durability: Durability, patience: float) -> bytes:
    """The packed command that waits for confirmations of all that was said before on its connection."""
    pause = str(_pause_of(durability, patience)).encode()
    count = str(durability.replicas).encode()
    command = (b"WAITAOF", b"1", count, pause) if durability.fsync else (b"WAIT", count, pause)
    return b"*%d\r\n" % len(command) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in command])


def shortfall(durability: Durability, local: int, replicas: int, patience: float) -> NotConfirmed | None:
    """What is missing of what was asked for; None: nothing.

    Args:
        durability: What was asked for.
        local: 1 if the primary did all that it was to do.
        replicas: How many confirmed it.
        patience: As it was given to :func:`words`.
    """
    seconds = _pause_of(durability, patience) / 1000
    if replicas < durability.replicas:
        what = "wrote to disk" if durability.fsync else "confirmed"
        counts = f"only {replicas} of {durability.replicas} replicas {what} within {seconds:g} s"
    elif local < 1:
        counts = f"the primary did not write to disk within {seconds:g} s"
    else:
        return None
    return NotConfirmed(f"{counts} (durability={shown(durability)})")


def shown(durability: Durability) -> str:
    """As its author wrote it."""
    if durability == PRIMARY:
        return repr("primary")
    return repr({"fsync" if durability.fsync else "replicas": durability.replicas or "local"})


def highest(asked: Iterable[Durability]) -> list[Durability]:
    """What confirms all of these: the most of each kind.

    It waits as long as those wait who ask for the most: if they are confirmed, all are.
    """
    most: dict[bool, Durability] = {}
    for one in asked:
        if one != PRIMARY:
            known = most.get(one.fsync, one)
            most[one.fsync] = max(one, known, key=lambda each: (each.replicas, each.timeout_ms))
    return list(most.values())


def number_of(durability: Durability) -> int:
    """As one whole number, for a slot."""
    return durability.replicas << 33 | int(durability.fsync) << 32 | durability.timeout_ms


def numbered(number: int) -> Durability:
    """That of :func:`number_of`."""
    return Durability(number >> 33, bool(number >> 32 & 1), number & 0xFFFFFFFF) if number else PRIMARY
