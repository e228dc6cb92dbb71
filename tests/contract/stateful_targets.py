"""The stores of the stateful tests, with a view of all that they hold, and a hand that lets time pass."""

import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import redis

from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.base import LockStore
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.memory.backend import MemoryBackend, MemoryClock
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.rules.records import Records
from tests.contract.queue_helpers import SECOND
from tests.support.backends import BACKEND, CheckedBackend, proven_backend
from tests.support.faulty_backend import Fault, FaultyBackend, Resending, conflict, lost_reply, one_in_three
from tests.support.memory_view import all_values
from tests.support.servers import Server
from tests.support.stores import store_at

__all__ = ["TARGETS", "EngineTarget", "Seen", "ServerTarget", "Target"]


class Seen(NamedTuple):
    """Everything that a store holds, in the words of the wire format.

    Args:
        at: The time of the look, in microseconds since the epoch.
        held: The values of all keys.
        lives: Milliseconds until each key expires; -1: it does not expire.
    """

    at: int
    held: dict[str, Any]
    lives: dict[str, int]


class ServerTarget:
    """The Redis store on an empty server."""

    #: It has an index of unsettled runs, which is a key too.
    indexes_runs = True

    def __init__(self, server: Server) -> None:
        self.prefix = uuid.uuid4().hex
        self.store = store_at(server.url(), timeout=5, prefix=self.prefix)
        self._client: redis.Redis = server.client()

    def close(self) -> None:
        self.store.close()
        self._client.close()

    def losses(self) -> int:
        """Return how many replies were lost."""
        return 0

    def now_us(self) -> int:
        seconds, micros = self._client.time()
        return int(seconds) * SECOND + int(micros)

    def look(self) -> Seen:
        # Without the wake-up of a waiting caller: no caller blocks here, and it expires. See test_waiting.
        found = [key for key in self._client.scan_iter(f"{self.prefix}:*", count=10_000) if ":wake:" not in key]
        with self._client.pipeline(transaction=False) as pipe:
            for key in found:
                pipe.type(key)
            types = pipe.execute()
        with self._client.pipeline(transaction=False) as pipe:
            pipe.time()
            for key, kind in zip(found, types, strict=True):
                pipe.pttl(key)
                if kind == "zset":
                    pipe.zrange(key, 0, -1, withscores=True)
                else:
                    pipe.hgetall(key) if kind == "hash" else pipe.get(key)
            (seconds, micros), *facts = pipe.execute()
        values = facts[1::2]
        held = {
            key: dict(value) if kind == "zset" else value for key, kind, value in zip(found, types, values, strict=True)
        }
        return Seen(int(seconds) * SECOND + int(micros), held, dict(zip(found, facts[::2], strict=True)))

    def expire_lock(self, name: LockName) -> None:
        self._client.pexpire(LockKeys.of(self.prefix, name).lock, -1)

    def end_grant_time(self, name: LockName) -> None:
        """Let the time of a grant pass."""
        keys = LockKeys.of(self.prefix, name)
        self._client.hset(keys.lock, "due", "1")
        self._client.zadd(keys.queue()[3], {keys.name: 1})

    def end_delay(self, name: LockName, identity: str) -> None:
        """Let the time of a delayed waiter come."""
        self._client.zadd(LockKeys.of(self.prefix, name).queue()[2], {identity: 1}, xx=True)

    def visit(self, name: LockName) -> None:
        """Let the time of the planned sweep come, if there is one."""
        keys = LockKeys.of(self.prefix, name)
        self._client.zadd(keys.queue()[3], {keys.name: 1}, xx=True)

    def forget_scripts(self) -> None:
        self._client.script_flush()


class EngineTarget:
    """The engine over a backend.

    Args:
        fault: Done in place of one commit of three; None: no commit fails.
    """

    indexes_runs = False
    prefix = "dlock"

    def __init__(self, fault: Fault | None = None) -> None:
        self._time = time.time_ns() // 1000
        clock = MemoryClock(lambda: self._time)
        self._memory = MemoryBackend(clock)
        checked: Any = CheckedBackend(proven_backend(clock), self._memory)
        self._backend = FaultyBackend(checked, one_in_three(1) if fault else lambda: False, fault or conflict, 60)
        self._loses = fault is lost_reply
        self._hand = EngineStore(checked)
        self.store: LockStore = Resending(EngineStore(self._backend))  # type: ignore[arg-type,assignment]

    def close(self) -> None:
        self.store.close()

    def losses(self) -> int:
        """Return how many replies were lost."""
        return self._backend.faults if self._loses else 0

    def now_us(self) -> int:
        # Each step has its own time, and the time stands still within a command.
        self._time += 1
        return self._time

    def look(self) -> Seen:
        now, found = self.now_us(), all_values(self._memory, self.prefix)
        lives = {key: -1 if until is None else -((now - until) // 1000) for key, (_, until) in found.items()}
        return Seen(now, {key: value for key, (value, _) in found.items()}, lives)

    def expire_lock(self, name: LockName) -> None:
        self._hand.run(name, Records.drop_lock)

    def end_grant_time(self, name: LockName) -> None:
        """Let the time of a grant pass."""

        def rule(records: Records) -> None:
            lock = records.lock()
            assert lock
            lock.due = 1
            records.put_lock(lock)
            records.sweep_at(1)

        self._hand.run(name, rule)

    def end_delay(self, name: LockName, identity: str) -> None:
        """Let the time of a delayed waiter come."""

        def rule(records: Records) -> None:
            if records.score("delayed", identity) is not None:
                records.put_in("delayed", identity, 1)

        self._hand.run(name, rule)

    def visit(self, name: LockName) -> None:
        """Let the time of the planned sweep come, if there is one."""
        self._hand.run(name, lambda records: records.sweep_at(1) if records.next_sweep() is not None else None)

    def forget_scripts(self) -> None:
        """Do nothing: it has none."""


Target = ServerTarget | EngineTarget
MakeTarget = Callable[[Server], Target]
TARGETS: dict[str, MakeTarget] = {
    "redis": ServerTarget,
    BACKEND: lambda _server: EngineTarget(),
    f"{BACKEND}-conflicts": lambda _server: EngineTarget(conflict),
    f"{BACKEND}-lost-replies": lambda _server: EngineTarget(lost_reply),
}
