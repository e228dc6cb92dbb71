"""The steps of kombu's Redis transport with each message, read from the broker's append-only file."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path

#: For the broker's server: it writes down all that changes its data, and keeps all of it.
KEEPING = ("--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0")

UNACKED = "unacked"


def taken_and_never_noted(folder: Path, queue: str = "celery") -> set[str]:
    """Ids of the tasks of which a message left its list for a worker, which never noted it as unacknowledged.

    The transport does so in two steps (BRPOP, then ZADD and HSET). A worker that dies between them takes the message
    with it, also one that had been delivered and returned before.

    Args:
        folder: Of the broker's server, which keeps its history.
        queue: The list; the database is 0.
    """
    waiting: deque[dict[str, str]] = deque()
    taken: dict[str, str] = {}
    for command, *arguments in _commands(folder):
        word, key = command.upper(), arguments[0] if arguments else ""
        if key == queue:
            if word == "LPUSH":
                waiting.extendleft(map(_told, arguments[1:]))
            elif word == "RPUSH":
                waiting.extend(map(_told, arguments[1:]))
            else:
                assert word == "RPOP", command
                message = waiting.pop()
                taken[message["tag"]] = message["id"]
        elif word == "HSET" and key == UNACKED:
            for tag in arguments[1::2]:
                taken.pop(tag)
    return set(taken.values())


def _told(payload: str) -> dict[str, str]:
    message = json.loads(payload)
    return {"tag": message["properties"]["delivery_tag"], "id": message["headers"]["id"]}


def _commands(folder: Path) -> Iterator[list[str]]:
    """Those on database 0, in the order in which the server carried them out."""
    files = sorted(folder.rglob("*.aof"))
    assert files, f"{folder}: no append-only file"
    for file in files:
        database = "0"
        with file.open("rb") as lines:
            while line := lines.readline():
                if line.startswith(b"#"):  # a time stamp
                    continue
                assert line.startswith(b"*"), line
                command = []
                for _ in range(int(line[1:])):
                    size = int(lines.readline()[1:])
                    command.append(lines.read(size + 2)[:-2].decode(errors="replace"))
                if command[0].upper() == "SELECT":
                    database = command[1]
                elif database == "0":
                    yield command
