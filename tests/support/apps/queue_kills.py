"""Tasks under the queue policy, and the steps of a hand-off at which a test can have this very process killed.

Redis' key `kill:<step>`, in the result backend's database, names the process to kill when the step is reached next.
"child" is the process that reaches it, "worker" the whole worker. Steps are made in workers only.
"""

import os
import time
from collections.abc import Callable

import redis

from celery_dlock import singleton_task
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


def _wait_for_broker(settled: Callable[[int, int], bool]) -> None:
    """Wait until the numbers of the messages in the queue, and of those that are not acknowledged, satisfy this."""
    end = time.monotonic() + 5
    with redis.Redis.from_url(os.environ["DLOCK_TEST_BROKER_URL"]) as broker:
        while not settled(broker.llen("celery"), broker.hlen("unacked")) and time.monotonic() < end:
            time.sleep(0.01)


# Otherwise the releaser, too, is sent back by the death of its worker.
BEFORE_WORKER_DIES["take:after"] = lambda: _wait_for_broker(lambda _, unacked: unacked <= 1)
# The granted message was just published. kombu loses it if a worker dies after it took it and before it recorded it.
BEFORE_WORKER_DIES["published:before"] = lambda: _wait_for_broker(lambda queued, unacked: not queued and unacked == 2)

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
