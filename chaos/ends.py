"""The end of a message, as results, queues and logs show it."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from tests.support.servers import Server

READY = ("SUCCESS", "FAILURE", "REVOKED")
KEY = "celery-task-meta-"
LINE = re.compile(r"\[(\d+-\d+-\d+ [\d:]+,\d+): \w+/[\w-]+\] Task chaos\.\w+\[([0-9a-f-]{36})\] (.*)")
#: What a line of a worker's log says of a message, by its first words; other lines do not matter.
WORDS = {
    "received": "received",
    "is republished": "again",
    "is parked": "parked",
    "is a duplicate": "duplicate",
    "skipped": "skipped",
    "is stopped": "stopped",
    "succeeded": "succeeded",
}

#: What, when (monotonic, s), and which worker says so.
Trail = list[tuple[str, float, str]]


class Ends:
    """The stored ends of messages, looked up until each has one."""

    def __init__(self, results: Server) -> None:
        self._client = results.client()
        self.of: dict[str, str] = {}

    def look(self, sent: Sequence[str]) -> int:
        """Return the number of messages of `sent` without an end."""
        self.of.update(self._stored([task_id for task_id in sent if task_id not in self.of]))
        return len(sent) - sum(task_id in self.of for task_id in sent)

    def overwritten(self) -> dict[str, str]:
        """Return the present ends of the messages that had another end before."""
        return {task_id: end for task_id, end in self._stored(list(self.of)) if end != self.of[task_id]}

    def _stored(self, wanted: Sequence[str]) -> Iterator[tuple[str, str]]:
        for start in range(0, len(wanted), 500):
            ids = wanted[start : start + 500]
            for task_id, text in zip(ids, self._client.mget([KEY + task_id for task_id in ids]), strict=True):
                result = json.loads(text) if text else {}
                end = result.get("status")
                if end in READY:
                    yield task_id, f"{end} {result['result']['exc_type']}" if end == "FAILURE" else end


def waiting(ids: Iterable[str], broker: Server, parked: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the place of each of these messages that is still in the broker or parked in the store."""
    places: list[tuple[str, str]] = []
    with broker.client() as client:
        places += [("queue", text) for text in client.lrange("celery", 0, -1)]
        places += [("unacknowledged", text) for text in client.hvals("unacked")]
    places += parked
    return {task_id: place for task_id in ids for place, text in places if task_id in text}


def trails(logs: Iterable[Path]) -> dict[str, Trail]:
    """Return the log lines of the workers about each message, in order of time."""
    wall = time.time() - time.monotonic()
    found: dict[str, Trail] = {}
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            matched = LINE.match(line)
            what = matched and next((short for words, short in WORDS.items() if matched[3].startswith(words)), "")
            if matched and what:
                at = datetime.strptime(matched[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp() - wall
                found.setdefault(matched[2], []).append((what, at, log.stem))
    return {task_id: sorted(trail, key=lambda step: step[1]) for task_id, trail in found.items()}
