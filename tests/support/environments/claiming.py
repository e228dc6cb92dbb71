"""A worker and an app whose tasks claim; and, as a program, one of several publishers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import redis

from tests.support.lock_records import claimed_by
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import Urls


def urls_of(server: Server) -> Urls:
    return Urls(server.url(0), server.url(1), server.lock_url(2))


class Claims:
    """The claims in the store, and the gates of the bodies."""

    def __init__(self, server: Server, tasks: ModuleType) -> None:
        self.server, self.tasks = server, tasks
        self.locks = server.client(2)
        self.history = server.client(1)

    def of(self, task, n) -> str | None:
        """The id that has claimed the name."""
        return claimed_by(self.server, task.lock_spec.name_of((n,), {}), 2)

    def wait_free(self, task, n, within=10.0) -> None:
        eventually(lambda: self.of(task, n) is None, within, message=f"the claim of {task.name}({n}) is given up")

    def wait_at(self, gate, count=1) -> None:
        eventually(lambda: self.history.llen(f"at:{gate}") >= count, 20, message=f"a body is at the gate {gate}")

    def open(self, gate, count=1) -> None:
        self.history.rpush(f"gate:{gate}", *["x"] * count)

    def runs(self, n) -> list[str]:
        return list(self.history.lrange(f"ran:{n}", 0, -1))

    @contextmanager
    def busy_pool(self, gate, slots=2) -> Iterator[None]:
        """Every slot of the worker is taken, so that what comes now waits in the worker."""
        blockers = [self.tasks.busy.delay(gate) for _ in range(slots)]
        self.wait_at(gate, slots)
        try:
            yield
        finally:
            self.open(gate, slots)
            for blocker in blockers:
                blocker.get(timeout=20)


def publish_many() -> None:
    """Publishes until the names are through; prints how many of its calls were accepted."""
    from tests.support.apps import claiming  # noqa: PLC0415  # it reads its environment

    start, calls, names, gate = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    redis_gate = redis.Redis.from_url(claiming.app.conf.result_backend)
    redis_gate.blpop([gate], timeout=60)
    accepted = 0
    for number in range(start, start + calls):
        task_id = f"call-{number}"
        result = claiming.queued.apply_async((f"name-{number % names}",), task_id=task_id, ignore_result=True)
        accepted += result.id == task_id
    print(accepted)  # noqa: T201


if __name__ == "__main__":
    publish_many()
