"""Find, in the append-only file of the broker, the messages that kombu lost.

kombu's Redis transport pops a message from the queue, and records it as unacknowledged in a second command. If the
worker or its connection ends between the two, the message is lost. Only this file shows it.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import Server

#: The broker keeps every command: no rewrite may replace commands by the state that they led to.
KEEP_ALL = ("--auto-aof-rewrite-percentage", "0")


def never_recorded(broker: Server) -> set[str]:
    """Return the ids of the messages whose last copy that a worker took was never recorded."""
    queues: defaultdict[bytes, deque[tuple[str, str]]] = defaultdict(deque)
    #: The delivery tag of the copy that was taken last, by message id.
    taken: dict[str, str] = {}
    recorded: set[str] = set()
    for verb, key, *values in _commands(broker.folder):
        match verb:
            case b"LPUSH":
                queues[key].extendleft(map(_tag_and_id, values))
            case b"RPUSH":
                queues[key].extend(map(_tag_and_id, values))
            case b"RPOP":  # also what BRPOP did
                tag, task_id = queues[key].pop()
                taken[task_id] = tag
                recorded.discard(tag)  # a message that is delivered again keeps its tag
            case b"HSET" if key == b"unacked":
                recorded.update(tag.decode() for tag in values[::2])
    return {task_id for task_id, tag in taken.items() if tag not in recorded}


def _tag_and_id(text: bytes) -> tuple[str, str]:
    message = json.loads(text)
    return message["properties"]["delivery_tag"], str(message["headers"].get("id"))


def _commands(folder: Path) -> Iterator[list[bytes]]:
    """Yield the commands that have a key."""
    # Redis 6 has one file. Later servers number theirs; the first one, in another format, is of the empty server.
    numbered = sorted(folder.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    for path in numbered or [folder / "appendonly.aof"]:
        with path.open("rb") as lines:
            while line := lines.readline():
                if not line.startswith(b"*"):
                    continue  # an annotation
                verb, *rest = [lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
                if rest:
                    yield [verb.upper(), *rest]
