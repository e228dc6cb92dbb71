"""kombu: over Redis a publisher names the queue that a message is requeued to; if that is no list, the worker ends."""

from __future__ import annotations

import json

import kombu
import redis

from tests.upstream.environment import running_server


def fault() -> str:
    with running_server() as server, server.client() as client, kombu.Connection(server.url()) as connection:
        client.sadd("a-set", "member")
        with connection.SimpleQueue("q") as queue:
            queue.put("work")
            forged = json.loads(client.rpop("q"))
            forged["properties"]["delivery_info"] = {"exchange": "", "routing_key": "a-set"}
            client.lpush("q", json.dumps(forged))
            message = queue.get(timeout=5)
            try:
                message.requeue()
            except redis.ResponseError as error:
                message.ack()
                return f"requeueing raises, although Celery's consumer expects no such error: {error}"
    return ""
