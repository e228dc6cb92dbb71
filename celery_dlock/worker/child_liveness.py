"""Is a child process gone? Asked about children of this process only."""

from __future__ import annotations

import os
import select
import signal

__all__ = ["ChildWatch"]


class ChildWatch:
    """Watches one child of this process.

    A pid alone is not enough: pids are reused, and a dead child that nobody has reaped yet still answers to
    ``kill(pid, 0)``. A pidfd names the process itself (Linux); elsewhere ``waitid`` looks without reaping.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = -1
        self._gone = False
        if hasattr(os, "pidfd_open"):
            try:
                self._fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True
            except OSError:
                self._fd = -1  # an old kernel, or a sandbox without the call

    @property
    def pidfd(self) -> int | None:
        """A descriptor that can be read as soon as the child is dead; None if it is, or where there is none."""
        return self._fd if self._fd >= 0 else None

    def gone(self) -> bool:
        if not self._gone:
            self._gone = self._exited()
            if self._gone:
                self.close()
        return self._gone

    def send(self, number: int) -> None:
        """Send the child a signal; nothing happens if it is gone."""
        if self.gone():
            return
        try:
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # it died just now

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _exited(self) -> bool:
        if self._fd >= 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True
