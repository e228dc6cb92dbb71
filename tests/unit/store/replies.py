"""Connections of redis-py without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def connection_with_reply(reply: Any) -> Any:
    """Return a connection that reads this reply to each command; an exception is raised."""

    def read_response() -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply

    return SimpleNamespace(send_command=lambda *words: None, read_response=read_response)
