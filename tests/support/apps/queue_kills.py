"""Tasks under the queue policy, and the steps of a hand-over at which a test can have this very process killed.

Redis' key `kill:<step>`, in the result backend's database, names whom to kill the next time that the step is reached:
"child", the process that reaches it, or "worker", the whole worker. Steps are made in workers only.
"""

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import redis

from celery_dlock import singleton_task
from celery_dlock.messaging.handoff import GrantPublisher
from celery_dlock.store.redis.store import RedisStore
from tests.support.apps.base import make_app
from tests.support.apps.marks import marks_client

app = make_app(
    "queue_kills",
    # Longer than Celery may take to see that a child died (5 s), or a worker to start: else the next one goes first.
    dlock_turn=30,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_connection_max_retries=None,
    # The last one: for so long a worker that dies while it restores keeps the others from it, else for 5 minutes.
    broker_transport_options={"visibility_timeout": 4, "unacked_restore_interval": 0.2, "unacked_mutex_expire": 1},
)


def step(name: str) -> None:
    """Die here, if the test says so; once."""
    with marks_client() as client:
        whom = client.getdel(f"kill:{name}")
        if whom is None:
            return
        client.set(f"killed:{name}", os.getpid())
    if whom == b"worker":
        if name == "take:after":
            _wait_until_the_releaser_is_acknowledged()
        os.kill(os.getsid(0), signal.SIGKILL)  # the main process leads the session that the test made for it
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_until_the_releaser_is_acknowledged() -> None:
    """Else it, too, is sent back by the death of its worker."""
    end = time.monotonic() + 5
    with redis.Redis.from_url(os.environ["DLOCK_TEST_BROKER_URL"]) as broker:
        while broker.hlen("unacked") > 1 and time.monotonic() < end:
            time.sleep(0.01)


def stepped(owner: Any, method: str, name: str, asked: Callable[..., bool] = lambda *_: True) -> None:
    """Make steps `<name>:before` and `<name>:after` of a method; `asked` says of which calls."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not asked(*args):
            return original(*args, **kwargs)
        step(f"{name}:before")
        answer = original(*args, **kwargs)
        step(f"{name}:after")
        return answer

    setattr(owner, method, run)


def parks(_store: Any, _keys: Any, _acquisition: str, _ttl_ms: int, claim: Any) -> bool:
    return claim.queue is not None and bool(claim.queue.entry)


def takes_its_turn(_store: Any, _keys: Any, _acquisition: str, _ttl_ms: int, claim: Any) -> bool:
    return claim.queue is not None and not claim.queue.entry and bool(claim.queue.grant_id)


if "DLOCK_TEST_STEPS" in os.environ:
    stepped(RedisStore, "acquire", "park", parks)
    stepped(RedisStore, "acquire", "take", takes_its_turn)
    stepped(RedisStore, "release", "release", lambda _store, _keys, _acquisition, ending, *_: ending.final)
    stepped(RedisStore, "confirm_publish", "published")
    stepped(RedisStore, "sweep", "sweep")
    stepped(GrantPublisher, "_publish", "publish")


@singleton_task(app=app, name="kills.post", on_conflict="queue", key=["account"], ttl=2)
def post(account: str, number: int) -> int:
    with marks_client() as client:
        client.rpush(f"runs:{account}", json.dumps(["in", number, os.getpid()]))
        end = time.monotonic() + 20
        while client.exists(f"gate:{account}:{number}") and time.monotonic() < end:
            time.sleep(0.01)
        step("body")
        client.rpush(f"runs:{account}", json.dumps(["out", number, os.getpid()]))
    return number
