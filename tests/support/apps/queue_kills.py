"""Tasks under the queue policy, and the steps of a hand-off at which a test can have this very process killed.

Redis' key `kill:<step>`, in the result backend's database, names the process to kill when the step is reached next.
"child" is the process that reaches it, "worker" the whole worker. Steps are made in workers only.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import redis

from celery_dlock import singleton_task
from celery_dlock.keys.lock_name import LockName
from celery_dlock.messaging.handoff import GrantPublisher
from celery_dlock.store.redis.store import RedisStore
from tests.support.apps.base import make_app
from tests.support.apps.steps import BEFORE_WORKER_DIES, parks, recorded_post, stepped, takes_grant

app = make_app(
    "queue_kills",
    # Longer than Celery may take to see that a child died (5 s), or a worker to start: else the next one goes first.
    dlock_grant_timeout=30,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_connection_max_retries=None,
    # The last one: for so long a worker that dies while it restores keeps the others from it, else for 5 minutes.
    broker_transport_options={"visibility_timeout": 4, "unacked_restore_interval": 0.2, "unacked_mutex_expire": 1},
)


def _wait_until(settled: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not settled() and time.monotonic() < end:
        time.sleep(0.01)


def _wait_for_acknowledgements(*_: Any) -> None:
    """Otherwise the releaser, too, is sent back by the death of its worker."""
    with redis.Redis.from_url(os.environ["DLOCK_TEST_BROKER_URL"]) as broker:
        _wait_until(lambda: broker.hlen("unacked") <= 1)


def _wait_until_taken(store: RedisStore, name: LockName, identity: str, *_: Any) -> None:
    """Wait until the granted message, which was just published, has taken its lock.

    kombu loses a message if its worker dies after it took the message and before it recorded it. A message that has
    its lock was recorded.
    """

    def taken() -> bool:
        holder = store.inspect(name)
        return holder is None or (holder.kind, holder.identity) != ("grant", identity)

    _wait_until(taken)


BEFORE_WORKER_DIES["take:after"] = _wait_for_acknowledgements
BEFORE_WORKER_DIES["published:before"] = _wait_until_taken

if "DLOCK_TEST_STEPS" in os.environ:
    stepped(RedisStore, "acquire", "park", parks)
    stepped(RedisStore, "acquire", "take", takes_grant)
    stepped(RedisStore, "release", "release", lambda _store, _keys, _acquisition, ending, *_: ending.final)
    stepped(RedisStore, "confirm_publish", "published")
    stepped(RedisStore, "sweep", "sweep")
    stepped(GrantPublisher, "_publish", "publish")


@singleton_task(app=app, name="kills.post", on_conflict="queue", key=["account"], ttl=2)
def post(account: str, number: int) -> int:
    return recorded_post(account, number)
