"""Every policy, for workers and publishers of two builds. Only options and imports that both builds have."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import celery_dlock
from celery_dlock import singleton_task
from tests.support.apps.base import History, make_app, still_held

app = make_app(
    "two_versions",
    dlock_grant_timeout=5,
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    result_expires=600,
)
history = History.of_environ()
#: The directory of the build that this process has imported.
BUILD = str(Path(celery_dlock.__file__).parent.parent)


def body(task: Any, name: int, number: int) -> int:
    with history.recorded_body({"task": task.name, "id": task.request.id, "name": name, "build": BUILD}):
        end = time.monotonic() + 0.03
        while time.monotonic() < end:
            time.sleep(0.005)
            if not still_held(task.lease):
                raise RuntimeError("the lease is lost")
    return number


#: Each task, its options, and how many of its bodies may run at once.
POLICIES: dict[str, dict[str, Any]] = {
    "skip": {"on_conflict": "skip"},
    "raise": {"on_conflict": "raise"},
    "wait": {"on_conflict": "skip", "wait": 20},
    "retry": {"on_conflict": "retry", "retry_delay": 0.2, "retry_delay_max": 1, "max_retries": None},
    "queue": {"on_conflict": "queue"},
    "seats": {"on_conflict": "queue", "limit": 2},
    "debounce": {"on_conflict": "queue", "debounce": 1},
    "replace": {"on_conflict": "replace"},
    "unique": {"unique": "queued", "on_conflict": "queue"},
    "once": {"once_per": 3600, "on_conflict": "retry", "retry_delay": 0.2},
}
for policy, options in POLICIES.items():

    @singleton_task(app=app, bind=True, name=policy, key=["name"], ttl=5, **options)
    def _run(self: Any, name: int, number: int) -> int:
        return body(self, name, number)


def publish(first: int, number: int, names: int, pause: float) -> dict[str, list[str]]:
    """Publish so many calls, the policies in turn. Return the task ids by policy."""
    ids: dict[str, list[str]] = {policy: [] for policy in POLICIES}
    policies = list(POLICIES)
    for n in range(first, first + number):
        policy = policies[n % len(policies)]
        result = app.tasks[policy].delay(n // len(policies) % names, n)
        ids[policy].append(result.id)
        time.sleep(pause)
    return ids


if __name__ == "__main__":
    json.dump(publish(*map(int, sys.argv[1:4]), float(sys.argv[4])), sys.stdout)
