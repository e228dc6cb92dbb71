"""The append-only history: one JSON line per event, from every process."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import Self

VARIABLE = "DLOCK_CHAOS_HISTORY"

Event = dict[str, Any]


class History:
    """A file that many processes append to; `at` is CLOCK_MONOTONIC in ns, which they share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_environ(cls) -> Self:
        return cls(Path(os.environ[VARIABLE]))

    def note(self, what: str, **facts: Any) -> int:
        """Append one event; returns its time."""
        at = time.monotonic_ns()
        line = json.dumps({"at": at, "what": what, **facts}) + "\n"
        # Opened anew: a fork shares no descriptor's fate, and one write to O_APPEND is never torn by another.
        written = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(written, line.encode())
        finally:
            os.close(written)
        return at

    def events(self) -> list[Event]:
        """All of it, by time."""
        return sorted(Tail(self).new(), key=lambda event: event["at"])


class Tail:
    """Reads on where it stopped."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._offset = 0

    def new(self) -> Iterator[Event]:
        if not self._history.path.exists():
            return
        with self._history.path.open("rb") as lines:
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    return  # being written just now
                self._offset += len(line)
                yield json.loads(line)
