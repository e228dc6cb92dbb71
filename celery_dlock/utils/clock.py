"""The clocks. What decides about a lease reads the time through them, so that a test can move it."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Protocol

__all__ = ["Clock", "SystemClock", "boot_and_times", "monotonic_clock_id"]


class Clock(Protocol):
    """The times that the package uses, in seconds."""

    def monotonic(self) -> float:
        """Return the time of a clock that never steps. All processes of a machine share it."""
        ...

    def wall(self) -> float:
        """Return the seconds since the epoch, for display, for ETAs, and for ages that another machine measures."""
        ...


class SystemClock:
    """The clocks of the operating system."""

    # The C functions, without a wrapper: each task reads the time four times.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def boot_and_times() -> tuple[str, str]:
    """Return the id of the kernel's boot, and the namespace of clocks ("" before Linux 5.6).

    Raises:
        OSError, ValueError: The system does not tell them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    times = Path("/proc/self/ns/time")
    return boot, str(times.readlink()) if times.is_symlink() else ""


@functools.cache
def monotonic_clock_id() -> str:
    """Return the id of the monotonic clock of this system; "" if the system does not tell it."""
    try:
        return " ".join(boot_and_times())
    except (OSError, ValueError):
        return ""
