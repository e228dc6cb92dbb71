"""What happened, written down by the processes themselves: one append-only file of facts."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the history. `at` is the monotonic clock, which all processes of a host share."""

    what: str  # ready, publish, receive, deliver, enter, leave or part
    at: float
    pid: int
    task: str = ""
    task_id: str = ""
    subject: str = ""  # what the call is about: only calls of one task with one subject exclude each other
    run: str = ""  # one entry into a body: a task id may enter more than once
    tick: str = ""  # when the night was, of a report that a beat asked for


class History:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, fact: Fact) -> None:
        # One write to an O_APPEND file is never mixed with another's, and a SIGKILL right behind it
        # takes nothing back. A logger or a buffered file promises neither.
        os.write(self._fd, json.dumps(asdict(fact)).encode() + b"\n")

    def read(self) -> list[Fact]:
        lines = self._path.read_text().splitlines(keepends=True)
        return [Fact(**json.loads(line)) for line in lines if line.endswith("\n")]
