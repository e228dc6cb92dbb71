"""Tasks under the queue policy, acknowledged late and early.

Their processes can be killed at the steps of `tests.support.apps.steps`.
"""

import os
from typing import Any

from celery import Celery

from celery_dlock import singleton_task
from celery_dlock.messaging.handoff import GrantPublisher
from celery_dlock.messaging.message import PROPERTY, Delivery
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.worker.delivery_registry import DeliveryRegistry
from celery_dlock.worker.request import SingletonRequest
from tests.support.apps.steps import parks, recorded_post, stepped, takes_grant

BROKER = os.environ["DLOCK_TEST_BROKER_URL"]

app = Celery("queue_faults", broker=BROKER, backend=os.environ["DLOCK_TEST_RESULT_URL"])
app.conf.update(
    dlock_url=os.environ["DLOCK_TEST_LOCK_URL"],
    dlock_grant_timeout=2,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    worker_log_color=False,
)
if BROKER.startswith("redis"):
    # RabbitMQ delivers again as soon as a connection is gone.
    app.conf.broker_transport_options = {
        "visibility_timeout": 4,
        "unacked_restore_interval": 0.2,
        "unacked_restore_throttle": 1,
        # A worker that dies while it restores keeps the others from it for so long.
        "unacked_mutex_expire": 1,
    }


def is_turn(_deliveries: Any, request: Any, _name: Any) -> bool:
    """Called in the main process, for what is on its way to the pool."""
    return bool(Delivery(*request.request_dict["properties"][PROPERTY]).grant_id)


if "DLOCK_TEST_STEPS" in os.environ:
    stepped(RedisStore, "acquire", "park", parks)
    stepped(RedisStore, "acquire", "take", takes_grant)
    stepped(RedisStore, "release", "release", lambda _store, _keys, _acquisition, ending, *_: ending.final)
    stepped(RedisStore, "confirm_publish", "published")
    stepped(RedisStore, "sweep", "sweep", answered=lambda taken: taken.granted is not None)
    stepped(GrantPublisher, "_publish", "publish")
    stepped(DeliveryRegistry, "number", "received", is_turn)
    stepped(SingletonRequest, "dlock_acknowledge", "acknowledge", lambda request: request._dlock_held_back)


QUEUED = {"on_conflict": "queue", "key": ["account"], "ttl": 2, "scope": "task"}

late = singleton_task(app=app, name="faults.late", acks_late=True, reject_on_worker_lost=True, **QUEUED)(recorded_post)
early = singleton_task(app=app, name="faults.early", **QUEUED)(recorded_post)
