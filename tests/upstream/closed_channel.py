"""kombu: acknowledging a message over a closed Redis channel raises nothing, though the message is delivered again."""

from __future__ import annotations

from typing import Any

import kombu

from tests.upstream.environment import running_server


def fault() -> str:
    with running_server() as server:
        with kombu.Connection(server.url()) as connection:
            queue: Any = connection.SimpleQueue("q")
            queue.put("work")
            message = queue.get(timeout=5)
            queue.close()
            queue.channel.close()
            try:
                message.ack()
            except Exception:  # noqa: BLE001  # any error tells that the acknowledgement is lost
                return ""
        with kombu.Connection(server.url()) as later, later.SimpleQueue("q") as queue:
            again = queue.get(timeout=5)
            again.ack()
            return f"acknowledged without an error, and delivered again: {again.payload!r}"
