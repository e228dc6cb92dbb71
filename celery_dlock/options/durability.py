"""The setting ``dlock_durability``: the servers that must confirm a write before it counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ..errors import NotConfirmed
from .durations import seconds_within
from .error_texts import invalid_value

__all__ = [
    "PRIMARY",
    "Durability",
    "check_timeout",
    "check_ttl",
    "durability_of",
    "shortfall",
    "shown",
    "wait_command",
]


class Durability(NamedTuple):
    """The confirmations that a write needs, besides its execution by the primary.

    Args:
        replicas: The number of replicas that must confirm it.
        fsync: Whether the primary and that many replicas must have written it to disk.
        timeout_ms: Milliseconds that the confirmations may take.
    """

    replicas: int = 0
    fsync: bool = False
    timeout_ms: int = 0


PRIMARY: Final = Durability()

#: Default seconds that a write waits for its confirmations. A replica reports once a second what it wrote to disk, and
#: a primary with ``appendfsync everysec`` writes to its disk once a second.
DEFAULT_TIMEOUT, DEFAULT_DISK_TIMEOUT = 0.5, 1.5
#: The largest number of replicas. No deployment has that many.
MAX_REPLICAS: Final = 1000
#: A renewal can wait for the disks of replicas only with a ttl of this many seconds or more.
DISKS_TTL: Final = 15.0
_MIN_TIMEOUT: Final = 0.001
_EXPECTED: Final = (
    "'primary', {'replicas': n, 'timeout': s}, {'fsync': 'local', 'timeout': s} or {'fsync': n, 'timeout': s}, "
    f"n a whole number from 1 to {MAX_REPLICAS}, the timeout optional"
)


def durability_of(option: str, value: object) -> Durability:
    """Return the parsed value of the setting.

    Raises:
        InvalidLockOptions: The value is invalid.
    """
    if value == "primary":
        return PRIMARY
    if not isinstance(value, Mapping) or len(value.keys() - {"timeout"}) != 1:
        raise invalid_value(option, value, _EXPECTED)
    default = DEFAULT_DISK_TIMEOUT if "fsync" in value else DEFAULT_TIMEOUT
    timeout = seconds_within(f"{option}['timeout']", value.get("timeout", default), _MIN_TIMEOUT, 30.0)
    timeout_ms = max(1, round(timeout * 1000))  # WAIT takes 0 as "no timeout"
    if value.get("fsync") == "local":
        return Durability(0, fsync=True, timeout_ms=timeout_ms)
    count = value.get("replicas", value.get("fsync"))
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_REPLICAS:
        raise invalid_value(option, value, _EXPECTED)
    return Durability(count, "fsync" in value, timeout_ms)


def _wait_ms(durability: Durability, timeout: float) -> int:
    """Return the milliseconds that a server may wait, if the connection waits ``timeout`` seconds for its reply."""
    return max(1, min(durability.timeout_ms, int(timeout * 500)))


def check_timeout(durability: Durability, timeout: float) -> None:
    """Check that a write can wait for its confirmations within ``dlock_timeout``.

    Raises:
        InvalidLockOptions: The timeout of the durability is longer than half of ``dlock_timeout``.
    """
    seconds = durability.timeout_ms / 1000
    if seconds > timeout / 2:
        expected = f"seconds up to half of dlock_timeout ({timeout:g}); lower it, or raise dlock_timeout"
        raise invalid_value("dlock_durability['timeout']", seconds, expected)


def check_ttl(option: str, durability: Durability, ttl: float) -> None:
    """Check that a renewal can wait for its confirmations within the ttl.

    Raises:
        InvalidLockOptions: The disks of replicas must confirm it, and the ttl is too short for them.
    """
    if durability.fsync and durability.replicas and ttl < DISKS_TTL:
        reason = f"dlock_durability={shown(durability)}, because a replica reports once a second what it wrote to disk"
        raise invalid_value(option, ttl, f"seconds from {DISKS_TTL:g} with {reason}")


def wait_command(durability: Durability, timeout: float) -> bytes:
    """Return the packed command that waits for confirmation of all earlier writes of its connection.

    Args:
        durability: The confirmations to wait for.
        timeout: Seconds that the connection waits for a reply.
    """
    wait_ms = str(_wait_ms(durability, timeout)).encode()
    count = str(durability.replicas).encode()
    command = (b"WAITAOF", b"1", count, wait_ms) if durability.fsync else (b"WAIT", count, wait_ms)
    return b"*%d\r\n" % len(command) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in command])


def shortfall(durability: Durability, local: int, replicas: int, timeout: float) -> NotConfirmed | None:
    """Return the error for missing confirmations; None if all came.

    Args:
        durability: The confirmations that were required.
        local: 1 if the primary did all that was required of it.
        replicas: The number of replicas that confirmed.
        timeout: The timeout given to :func:`wait_command`.
    """
    seconds = _wait_ms(durability, timeout) / 1000
    if replicas < durability.replicas:
        what = "wrote to disk" if durability.fsync else "confirmed"
        counts = f"only {replicas} of {durability.replicas} replicas {what} within {seconds:g} s"
    elif local < 1:
        counts = f"the primary did not write to disk within {seconds:g} s"
    else:
        return None
    return NotConfirmed(f"{counts} (dlock_durability={shown(durability)})")


def shown(durability: Durability) -> str:
    """Return the durability as an author writes it, without its timeout."""
    if durability == PRIMARY:
        return repr("primary")
    return repr({"fsync" if durability.fsync else "replicas": durability.replicas or "local"})
