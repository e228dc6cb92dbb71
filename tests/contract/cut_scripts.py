"""Scripts that stop after one of their writes, and a world of workers that goes on afterwards."""

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pytest
import redis

from celery_dlock.errors import StoreRefused
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.model import Acquired, Duplicate, Grant, Held, Parked, Queued, Unknown, Used
from celery_dlock.store.operator import OperatorStore
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import ScriptVariant, _bulk
from tests.contract.queue_helpers import NAME, TRIES, TTL, TURN, digest, ending, request_of

#: Commands of the scripts that write nothing. All others count as writes.
READS: Final = (
    "exists", "hexists", "hget", "hmget", "hrandfield", "info", "mget", "pttl", "time", "zcard", "zmscore", "zrange",
    "zrangebyscore", "zrank", "zscore",
)  # fmt: skip
#: The key by which a script says that it was cut.
CUT: Final = "cut"
#: The ends of the names of keys that never expire by design, at most one for each bucket.
FOR_EVER: Final = re.compile(r":(last|quarantine|audit)$|^cut$")
#: Rounds in which every call must have ended.
ROUNDS: Final = 12

_WRAPPER: Final = """local redis = (function(server)
local reads, left = {%s}, %d
local function guard(run, refuse) return function(command, ...)
if not reads[string.lower(command)] then left = left - 1
if left == 0 then server.call('SET', 'cut', '1') return refuse() end end
return run(command, ...) end end
local text = 'NOPERM this write is refused by the test'
return setmetatable({call = guard(server.call, function() error(text) end),
pcall = guard(server.pcall, function() return {err = text} end)}, {__index = server})
end)(redis) """


class Cutter:
    """Stops a script at one of its writes: that write and all later ones have no effect.

    Args:
        client: A connection of an administrator.
    """

    def __init__(self, client: redis.Redis, patch: pytest.MonkeyPatch) -> None:
        self._client, self._armed = client, ("", 0)
        cutter, packed = self, ScriptVariant.packed

        def packed_cut(variant: ScriptVariant, texts: Any, *, whole: bool = False) -> bytes:
            script, at = cutter._armed
            if variant.name.rpartition("/")[2] != script:
                return packed(variant, texts, whole=whole)
            cutter._armed = ("", 0)
            reads = ",".join(f"{name}=true" for name in READS)
            source = (_WRAPPER % (reads, at)).replace("\n", " ").encode() + variant.source
            number = variant._layouts.number_of_keys(len(texts))
            words = [b"EVAL", source, b"%d" % number, *(text.encode() for text in texts)]
            return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))

        patch.setattr(ScriptVariant, "packed", packed_cut)

    @contextmanager
    def cut(self, script: str, at: int) -> Iterator[None]:
        """Cut the next run of this script, or of the one for a seat, at its n-th write."""
        self._armed = (script, at)
        with suppress(StoreRefused):
            yield
        assert self._armed == ("", 0), f"{script} did not run"

    @property
    def happened(self) -> bool:
        return bool(self._client.delete(CUT))


class World:
    """Workers that deliver messages, run their bodies, release and sweep, until each call has ended once.

    Args:
        store: The store.
        client: A connection of an administrator.
        name: The lock name.
        facts: What each acquire asks for.
    """

    def __init__(self, store: OperatorStore, client: redis.Redis, name: LockName = NAME, **facts: Any) -> None:
        self.store, self.client, self.name, self.facts = store, client, name, facts
        self.keys = LockKeys.of("dlock", name)
        self.numbers = itertools.count(1)
        self.first_rank = round(time.time() * 1e6)
        #: Deliveries that are not acknowledged, with the grant for which each was published.
        self.open: list[tuple[str, str]] = []
        self.known: list[str] = []
        #: The acquisitions of the running bodies, by task id.
        self.running: dict[str, str] = {}
        #: Commands that the store refused.
        self.pending: list[Callable[[], object]] = []
        #: Those of bodies whose process is paused.
        self.paused: dict[str, str] = {}
        self.ran: list[str] = []
        self.ended: set[str] = set()
        self.evicts_nothing = False

    # -- what a worker does

    def deliver(self, task_id: str, grant_id: str = "", **more: Any) -> None:
        """Deliver a message, new or not. If the store refuses it, it is delivered again."""
        if task_id not in self.known:
            self.known.append(task_id)
        rank = self.first_rank + self.known.index(task_id)
        self.open.append((task_id, grant_id))
        facts = {"parks": True, "rank_us": rank, "republished": True, "grant_id": grant_id, **self.facts, **more}
        if not facts.pop("queue", True):
            facts = {key: value for key, value in facts.items() if key not in ("parks", "grant_id")}
            request = request_of(task_id, **facts)._replace(queue=None)
        else:
            request = request_of(task_id, **facts)
        acquisition = f"{task_id}.{next(self.numbers)}"
        answer = self.store.acquire(self.name, acquisition, TTL, request)
        self.publish(getattr(answer, "granted", None))
        if isinstance(answer, Held | Queued):
            return  # the worker republishes it
        self.open.remove((task_id, grant_id))
        if isinstance(answer, Acquired):
            assert len(self.running) < max(1, self.name.seats), (self.running, task_id)
            assert task_id not in self.ran, f"{task_id} runs twice"
            self.running[task_id] = acquisition
            self.ran.append(task_id)
        elif isinstance(answer, Used | Unknown):
            self.ended.add(task_id)
        elif isinstance(answer, Parked) and answer.evicted:
            self.evict(answer.evicted)
        else:
            assert isinstance(answer, Parked | Duplicate), answer

    def evict(self, evicted: Grant) -> None:
        """Store its end, then delete its message. If the process that has to do it died, do nothing."""
        if self.evicts_nothing:
            return
        self.ended.add(self.id_of(evicted.identity))
        self.do(lambda: self.remove(evicted.identity, ended=True))

    def remove(self, identity: str, *, ended: bool = False, dead_letter: bool = False) -> None:
        options = {"ended": ended, "dead_letter": dead_letter}
        self.publish(self.store.remove_waiter(self.name, identity, self.granter(), **options).granted)

    def id_of(self, identity: str) -> str:
        return next(task_id for task_id in self.known if digest(task_id) == identity)

    def granter(self) -> str:
        return f"g.{next(self.numbers)}"

    def publish(self, granted: Grant | None) -> None:
        if granted is not None:
            self.open.append((self.id_of(granted.identity), granted.grant_id))
            with suppress(StoreRefused):
                self.store.confirm_publish(self.name, granted.identity, TURN)

    def do(self, command: Callable[[], object]) -> None:
        """Send a command. If the store refuses it, it is repeated later, before all other pending commands."""
        self.pending.insert(0, command)
        command()
        self.pending.remove(command)

    def finish(self, task_id: str, **facts: Any) -> None:
        """End its body, and release."""
        request = ending(task_id, **{"queue": self.facts.get("queue", True), **facts})
        if self.facts.get("replace"):
            request = request._replace(replace="ended")
        acquisition = self.running.pop(task_id)
        self.do(lambda: self.publish(self.store.release(self.name, acquisition, request).granted))

    @property
    def swept(self) -> LockName:
        """The name, as the sweeper knows it."""
        return self.name if self.name.seats == 1 else self.name._replace(seats=0)

    def sweep(self) -> None:
        """Sweep the name, if the index has it."""
        if self.store.list_due_queues([self.name.bucket], 10):
            self.publish(self.store.sweep(self.swept, self.granter(), TURN, TRIES).granted)

    def granted(self) -> tuple[str, str]:
        """Return the identity of the granted waiter, and the id of the grant."""
        for key in self.lock_keys():
            identity, grant_id, due = self.client.hmget(key, "identity", "since", "due")
            if due:
                return str(identity), str(grant_id)
        raise AssertionError(self.shown())

    # -- how time passes

    def time_passes(self) -> None:
        """Let every lease end that no running body renews, and let every grant and every waiter become due."""
        _, _, delayed, queues = self.keys.queue()
        renewed = set(self.running.values())
        for key in self.lock_keys():
            lock = self.client.hgetall(key)
            if "due" in lock:
                self.client.hset(key, "due", "1")
            elif lock.get("acq") not in renewed and self.client.pttl(key) >= 0:
                self.client.delete(key)
        for key in (delayed, queues):
            for member in self.client.zrange(key, 0, -1):
                self.client.zadd(key, {member: 1})

    def lock_keys(self) -> list[str]:
        return list(self.client.keys("dlock:*:lock:*"))

    def go_on(self, rounds: int = ROUNDS) -> None:
        """Let the workers go on, until each call has ended and the store has nothing left that never expires."""
        for _ in range(rounds):
            for command in list(self.pending):
                command()
                self.pending.remove(command)
            due, self.open = self.open, []
            for task_id, grant_id in due:
                self.deliver(task_id, grant_id)
            for task_id in list(self.running):
                self.finish(task_id)
            self.time_passes()
            self.sweep()
            if not (self.open or self.pending or self.not_ended or self.immortal()):
                return
        assert not self.not_ended, f"lost: {self.not_ended}; {self.shown()}"
        raise AssertionError(f"open: {self.open}; without an expiry: {self.immortal()}; {self.shown()}")

    @property
    def not_ended(self) -> set[str]:
        return set(self.known) - set(self.ran) - self.ended

    def check_places(self) -> None:
        """Each stored message has a place, and a sweep finds the name."""
        waiting, messages, delayed, queues = self.keys.queue()
        placed = {*self.client.zrange(waiting, 0, -1), *self.client.zrange(delayed, 0, -1)}
        placed |= {self.client.hget(key, "identity") for key in self.lock_keys() if self.client.hexists(key, "due")}
        stored = {field for field in self.client.hkeys(messages) if ":" not in field}
        assert stored <= placed, self.shown()
        assert not stored or self.client.zscore(queues, self.keys.name) is not None, self.shown()

    def immortal(self) -> list[str]:
        keys = [key for key in self.client.keys("*") if not FOR_EVER.search(key)]
        return [key for key in keys if self.client.pttl(key) == -1]

    def shown(self) -> dict[str, Any]:
        """Return every key with its value and its milliseconds left."""
        found: dict[str, Any] = {}
        for key in self.client.keys("*"):
            match self.client.type(key):
                case "hash":
                    value: Any = self.client.hgetall(key)
                case "zset":
                    value = self.client.zrange(key, 0, -1, withscores=True)
                case kind:
                    value = kind if kind == "list" else self.client.get(key)
            found[key] = value, self.client.pttl(key)
        return found
