"""The history of the demo: an append-only file of facts that the processes write."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of the history. `at` is the monotonic clock, which all processes of a host share."""

    what: str  # ready, publish, receive, deliver, enter, leave or part
    at: float
    pid: int
    task: str = ""
    task_id: str = ""
    subject: str = ""  # only calls of one task with the same subject exclude each other
    run: str = ""  # one entry into a body; a task id may enter more than once
    tick: str = ""  # the night of a report that a beat published


class History:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, fact: Fact) -> None:
        # A write to an O_APPEND file is never mixed with another one, and survives a SIGKILL right after it.
        # A logger or a buffered file promises neither.
        os.write(self._fd, json.dumps(asdict(fact)).encode() + b"\n")

    def read(self) -> list[Fact]:
        lines = self._path.read_text().splitlines(keepends=True)
        return [Fact(**json.loads(line)) for line in lines if line.endswith("\n")]
