"""redis-py: some error replies lose their code, so only the class says which error it was."""

from __future__ import annotations

import redis

from tests.upstream.environment import running_server


def fault() -> str:
    with running_server() as server, server.client() as client:
        client.acl_setuser("reader", enabled=True, nopass=True, commands=["+get"], keys=["*"])
        reader = server.client(username="reader", password="any")
        try:
            with reader:
                reader.set("key", 1)
        except redis.exceptions.NoPermissionError as error:
            return "" if str(error).startswith("NOPERM") else f"NOPERM is not in: {error}"
    return ""
