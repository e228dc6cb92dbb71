"""A Redis store and an engine that do the same at the same time, and all differences between them.

The scripts of the Redis store read their time from a key instead of the server's clock. So both stores have one clock,
which the test moves, and their answers are equal to the microsecond. Lives are the server's own: they may differ.
"""

import copy
import functools
import hashlib
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import redis

from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_operator_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.memory.backend import MemoryBackend, MemoryClock
from celery_dlock.store.model import Released
from celery_dlock.store.redis.scripts import ScriptVariant, _bulk
from tests.support.backends import CheckedBackend, proven_backend
from tests.support.faulty_backend import Fault, FaultyBackend, Resending, conflict, lost_reply, one_in_three
from tests.support.memory_view import all_values
from tests.support.servers import Server

__all__ = ["TwoStores"]

#: Seconds by which the lives of keys may differ.
LIVES = 20.0
START_US = 1_800_000_000_000_000
_TIME = b"call('TIME')"


@functools.lru_cache(maxsize=256)
def _with_clock(variant: ScriptVariant, clock: str) -> ScriptVariant:
    """Return the script with the clock in the key ``clock``: a list of seconds and microseconds."""
    clone = copy.copy(variant)
    clone.source = variant.source.replace(_TIME, b"call('LRANGE', '%b', '0', '-1')" % clock.encode())
    clone.sha = hashlib.sha1(clone.source, usedforsecurity=False).hexdigest()
    clone._evalsha = _bulk(b"EVALSHA") + _bulk(clone.sha.encode())
    clone._eval = _bulk(b"EVAL") + _bulk(clone.source)
    clone._layouts = copy.copy(variant._layouts)
    clone._layouts.clear()
    clone._layouts._variant = clone
    return clone


class _ClockedTopology:
    """A topology whose scripts read the test's clock."""

    def __init__(self, topology: Any, clock: str) -> None:
        self._topology, self._clock = topology, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topology, name)

    def _changed(self, part: Any) -> Any:
        if isinstance(part, ScriptVariant):
            return _with_clock(part, self._clock)
        return tuple(map(self._changed, part)) if type(part) is tuple else part

    def call(self, key: str, *parts: Any) -> Any:
        return self._topology.call(key, *map(self._changed, parts))

    def each(
        self, pipeline: Any, calls: Sequence[Any], within: float | None = None, *, awaits_moves: bool = True
    ) -> Any:
        changed = [self._changed(tuple(one)) for one in calls]
        return self._topology.each(pipeline, changed, within, awaits_moves=awaits_moves)


class TwoStores:
    """The two stores.

    Args:
        server: The server of the Redis store.
        client: A connection to it.
        fault: Done in place of one commit of three of the memory store.
    """

    def __init__(
        self, server: Server, client: redis.Redis, clock_key: str = "clock", fault: Fault | None = None
    ) -> None:
        self.prefix = uuid.uuid4().hex
        self._client, self._clock_key = client, clock_key
        self.now_us = START_US
        clock = MemoryClock(lambda: self.now_us)
        #: Everything that the backend holds.
        self.memory = MemoryBackend(clock)
        backend: Any = CheckedBackend(proven_backend(clock), self.memory)
        self._faulty = FaultyBackend(backend, one_in_three(1) if fault else lambda: False, fault or conflict, 60)
        self._loses = fault is lost_reply
        self.local = Resending(EngineStore(self._faulty))  # type: ignore[arg-type]
        self.redis = open_operator_store((StoreLocation.of(server.url()),), timeout=5, prefix=self.prefix)
        self.redis._topology = _ClockedTopology(self.redis._topology, clock_key)  # type: ignore[attr-defined]
        self.travel(1)

    def travel(self, microseconds: int) -> None:
        lives = {key: until for key, (_, until) in all_values(self.memory, self.prefix).items() if until is not None}
        self.now_us += microseconds
        # Each key lives as long as in memory: the time that the test has needed ends nothing in the server alone.
        # Slightly in the past: a lock that lived longer than its ttl would count as one whose clock went back.
        base_ms = int(time.time() * 1000) - 20
        with self._client.pipeline(transaction=True) as pipe:
            pipe.delete(self._clock_key)
            pipe.rpush(self._clock_key, self.now_us // 1_000_000, self.now_us % 1_000_000)
            for key, until in lives.items():
                pipe.pexpireat(key, base_ms - (self.now_us - until) // 1000)
            pipe.execute()

    def do(self, command: Callable[[Any], Any]) -> Any:
        """Carry a command out on both. Return the memory store's answer, which is the Redis store's, too.

        If the memory store lost a reply, it sent the command twice, and so the Redis store gets it twice. The answer is
        that of one of the two copies.
        """
        before = self._faulty.faults
        expected, seen = command(self.local), command(self.redis)
        if not self._loses or self._faulty.faults == before:
            same(seen, expected, "reply")
            return expected
        again = command(self.redis)
        try:
            same(again._replace(ours=True) if isinstance(again, Released) else again, expected, "second reply")
        except AssertionError:
            same(seen, expected, "first reply")
        return expected

    def check(self) -> None:
        """Compare everything that the stores hold."""
        held, lives = self._held()
        expected = all_values(self.memory, self.prefix)
        index = [key for key in held if key.endswith(":queues")]
        assert {key: _shown(value) for key, value in held.items() if key not in index} == {
            key: _shown(value) for key, (value, _) in expected.items() if not key.endswith(":queues")
        }
        for key in index:
            value = expected[key][0] if key in expected else {}
            assert held[key].keys() == value.keys()
            for name, at in value.items():
                assert abs(held[key][name] - at) < LIVES * 1e6, (held[key], value)
        for key, (_, until) in expected.items():
            left = -1 if until is None else (until - self.now_us) / 1000
            assert lives[key] == -1 if left == -1 else abs(lives[key] - left) < LIVES * 1000, (key, lives[key], left)

    def _held(self) -> tuple[dict[str, Any], dict[str, int]]:
        found = [
            key for key in self._client.keys(f"{self.prefix}:*") if ":wake:" not in key and ":unsettled" not in key
        ]
        with self._client.pipeline(transaction=False) as pipe:
            for key in found:
                pipe.type(key)
            kinds = pipe.execute()
        with self._client.pipeline(transaction=False) as pipe:
            for key, kind in zip(found, kinds, strict=True):
                pipe.pttl(key)
                if kind == "zset":
                    pipe.zrange(key, 0, -1, withscores=True)
                else:
                    pipe.hgetall(key) if kind == "hash" else pipe.get(key)
            facts = pipe.execute()
        lives = dict(zip(found, facts[::2], strict=True))
        values = [dict(value) if kind == "zset" else value for kind, value in zip(kinds, facts[1::2], strict=True)]
        return dict(zip(found, values, strict=True)), lives

    def close(self) -> None:
        self.redis.close()
        self._client.flushdb()


def _shown(value: Any) -> Any:
    """Return the value without the random id of an operator's command in a run mark."""
    return re.sub(r"^[0-9a-f]{32}$", "command", value, flags=re.MULTILINE) if isinstance(value, str) else value


def same(seen: Any, expected: Any, where: str) -> None:
    """Fail unless both are equal, but for lives."""
    assert type(seen) is type(expected), (where, seen, expected)
    if is_dataclass(expected) and not isinstance(expected, type):
        for each in fields(expected):
            if each.name == "expires_in":
                assert abs(seen.expires_in - expected.expires_in) < LIVES, (where, seen, expected)
            else:
                same(getattr(seen, each.name), getattr(expected, each.name), f"{where}.{each.name}")
    elif isinstance(expected, tuple | list):
        assert len(seen) == len(expected), (where, seen, expected)
        for place, (one, other) in enumerate(zip(seen, expected, strict=True)):
            same(one, other, f"{where}[{place}]")
    else:
        assert _shown(seen) == _shown(expected), (where, seen, expected)
