"""States of lock names, as this version writes them; `python -m tests.wire.states FILE` freezes them.

They are frozen once for each wire version. Later versions must understand them (tests/wire/test_frozen_states.py).
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import redis
from celery import Celery

from celery_dlock import singleton_task
from celery_dlock.control.audit import Audit
from celery_dlock.keys.lock_name import LockName, shared_name
from celery_dlock.locking.events import Listeners
from celery_dlock.messaging.message import FirstReceipt, RawMessage, RepublishHeader
from celery_dlock.messaging.message_times import with_sent_time
from celery_dlock.messaging.parked import ParkedMessage
from celery_dlock.messaging.tick_header import Tick, header_for
from celery_dlock.messaging.wire import WIRE_VERSION
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.factory import open_operator_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import AcquireRequest, Debounce, Identity, QueueRequest, Renewal, Replace, Requester
from celery_dlock.store.operator import OperatorStore
from celery_dlock.store.redis.commands import command
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.task.call_options import headers_for
from celery_dlock.worker.crash_record import HeldLease, HostIdentity, ProcessIdentity, WorkerRecord
from tests.support.servers import Server

TTL: Final = 3_600_000
RANK_US: Final = 1_790_000_000_000_000
RECEIPT: Final = FirstReceipt(1_790_000_000_000_000, 5, "boot1")
_CHILD: Final = ProcessIdentity(78, 901)
RECORD: Final = WorkerRecord(
    HostIdentity("machine1", "boot1", "pid:[1]", "time:[1]"),
    ProcessIdentity(77, 900),
    (
        HeldLease(shared_name("sample-held"), "a.1", 30.0, _CHILD),
        HeldLease(shared_name("sample-seated")._replace(seats=2), "a.2", 30.0, _CHILD),
    ),
)
BROKER: Final = "redis://broker:6379/0"
#: The options of one call, which its message carries: a list, a text and numbers.
CALL_OPTIONS: Final = {"key": ("n",), "on_conflict": "queue", "ttl": 45.5, "queue_limit": 3}
TICK: Final = Tick("entry1", 1_790_000_000.0)
Key = dict[str, Any]


def request(task_id: str, **facts: Any) -> AcquireRequest:
    return AcquireRequest(Requester("app.post", task_id, "node1", "77"), Identity(task_id), **facts)


def entry(task_id: str) -> str:
    headers = {"task": "app.post", "id": task_id, "argsrepr": "('***',)"}
    raw = RawMessage("[[7], {}, {}]", "application/json", "utf-8", headers, {"priority": 3}, "celery")
    return ParkedMessage.of(tuple(raw), BROKER, 10**15, 2).text()


def parked(task_id: str, **facts: Any) -> AcquireRequest:
    return request(task_id, queue=QueueRequest(entry(task_id), **facts))


def ending(task_id: str, **facts: Any) -> ReleaseRequest:
    by = Requester("app.post", task_id, "node1", "77").text
    return ReleaseRequest(identity=Identity(task_id).digest, requester=by, **{"final": True, **facts})


def held(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1"))
    store.renew([Renewal(name, "a.1", TTL, (("count", "2"),))])


def waiting(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1", queue=QueueRequest()))
    for number in (2, 3):
        store.acquire(name, f"b.{number}", TTL, parked(f"id{number}"))


def granted(store: OperatorStore, name: LockName) -> None:
    waiting(store, name)
    store.release(name, "a.1", ending("id1", queue=True))


def seated(store: OperatorStore, name: LockName) -> None:
    for number in (1, 2):
        store.acquire(name, f"a.{number}", TTL, request(f"id{number}", queue=QueueRequest()))
    store.acquire(name, "b.3", TTL, parked("id3"))


def published(store: OperatorStore, name: LockName) -> None:
    granted(store, name)
    store.confirm_publish(name, Identity("id2").digest, TTL)


def declined(store: OperatorStore, name: LockName) -> None:
    waiting(store, name)
    grant = store.release(name, "a.1", ending("id1", queue=True)).granted
    assert grant is not None
    store.decline_grant(name, grant, foreign=True)


def noted(store: OperatorStore, name: LockName) -> None:
    """A lock with every note that its release reads."""
    store.acquire(name, "a.1", TTL, request("id1", min_hold_ms=TTL, notify=True))
    store.acquire(name, "b.1", TTL, request("id2", notify=True))
    facts = (("releasing", "1"), ("dup", "1"), ("reserved_for", Identity("id1", 1).digest))
    store.renew([Renewal(name, "a.1", TTL, fields=facts)])


def to_be_held(store: OperatorStore, name: LockName) -> None:
    """An operator has asked to hold the lock from the release of its holder."""
    store.acquire(name, "a.1", TTL, request("id1"))
    store.hold(name, "operator:ada@host1", TTL, "a deploy")


def unknown(store: OperatorStore, name: LockName) -> None:
    """A later run ended without a success, so it settles nothing."""
    started(store, name)
    store.acquire(name, "b.1", TTL, request("id2", once=True))
    store.release(name, "b.1", ending("id2", once=True, window_ms=TTL))


def dead_letter(store: OperatorStore, name: LockName) -> None:
    waiting(store, name)
    store.remove_waiter(name, Identity("id2").digest, "sweep1", dead_letter=True)


def debounced(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "b.1", TTL, parked("id1", debounce=Debounce(100, 200)))


def replacing(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1", queue=QueueRequest(replace=Replace(TTL, 0))))
    store.acquire(name, "b.2", TTL, parked("id2", replace=Replace(TTL, 0)))


def used(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1", once=True))
    store.release(name, "a.1", ending("id1", once=True, used_ms=TTL))


def started(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1", once=True))
    store.release(name, "a.1", ReleaseRequest(outcome_unknown=True))


def used_tick(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1", once=True, tick="t1"))
    store.release(name, "a.1", ending("id1", once=True, used_ms=TTL, tick="t1"))


def claimed(store: OperatorStore, name: LockName) -> None:
    store.claim([(name, ClaimRequest("id1", 0, TTL, False, Requester("app.post", "id1", "host1", "5"), "p1"))])


def reserved(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1"))
    store.release(name, "a.1", ending("id1", reserved_for=Identity("id1", 1).digest, reserved_ms=TTL))


def kept(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1", min_hold_ms=TTL))
    store.release(name, "a.1", ending("id1"))


def operated(store: OperatorStore, name: LockName) -> None:
    store.hold(name, "operator:ada@host1", TTL, "a deploy")


def done(store: OperatorStore, name: LockName) -> None:
    store.acquire(name, "a.1", TTL, request("id1", republished=True))
    store.release(name, "a.1", ending("id1"))


def audited(store: OperatorStore, name: LockName) -> None:
    audit_of(store).record("hold", name.text, "a deploy", "held for 60 s")


def audit_of(store: OperatorStore) -> Audit:
    # With a name to send events, as in a worker, the audit itself sends none.
    runtime: Any = SimpleNamespace(listeners=Listeners(), monitored_as=lambda: "node1")
    made = Audit(Celery(set_as_current=False), runtime, store, "ada")
    made.host = "host1"
    return made


def quarantined(store: OperatorStore, name: LockName) -> None:
    quarantine_left_ms(store, name)


def quarantine_left_ms(store: Any, name: LockName) -> int:
    """Start the quarantine of one bucket, unless it has a record of this server. Return how long it lasts."""
    record = LockKeys.of("dlock", name).named("quarantine")
    start = command("start_quarantine", None, quarantine=record, quarantine_ms=str(TTL), failover_epoch="0")
    return int(store._run_safe(start))


def sweeping(store: OperatorStore, _: LockName) -> None:
    """A worker has the sweep lease of its broker."""
    store.sweep_lease(BROKER, "queues", "worker1", TTL)


def announced(store: OperatorStore, _: LockName) -> None:
    """A broker has workers."""
    store.announce_workers(BROKER, TTL)


def crash_recorded(store: OperatorStore, _: LockName) -> None:
    store.save_worker_record("node1", "worker1", RECORD.text, TTL)


#: What makes each state, of a name of its own.
STATES: Final[dict[str, tuple[LockName, Callable[[OperatorStore, LockName], None]]]] = {
    state.__name__: (shared_name(f"sample-{state.__name__}"), state)
    for state in (
        held, noted, to_be_held, waiting, granted, published, declined, dead_letter, debounced, replacing, used,
        started, unknown, used_tick, claimed, reserved, kept, operated, done,
        audited, quarantined, sweeping, announced, crash_recorded,
    )
} | {"seated": (shared_name("sample-seated")._replace(seats=2), seated)}  # fmt: skip


def frozen(client: redis.Redis) -> dict[str, Key]:
    """Return all keys of the database, with their types and values, and whether they have an expiry."""
    found = {}
    for key in sorted(client.scan_iter()):
        kind = client.type(key)
        read: dict[str, Callable[[], Any]] = {
            "string": lambda key=key: client.get(key),
            "hash": lambda key=key: client.hgetall(key),
            "zset": lambda key=key: client.zrange(key, 0, -1, withscores=True),
            "set": lambda key=key: sorted(client.smembers(key)),
            "list": lambda key=key: client.lrange(key, 0, -1),
        }
        found[key] = {"type": kind, "value": read[kind](), "expires": client.pttl(key) > 0}
    return with_ids(found, {own: f"<{of}>" for of, own in ids_of(client).items()})


def ids_of(client: redis.Redis) -> dict[str, str]:
    """Return the ids of a server, by which a quarantine knows it."""
    info = client.info()
    return {of: info[of] for of in ("run_id", "master_replid")}


def with_ids(keys: dict[str, Key], ids: dict[str, str]) -> dict[str, Key]:
    text = json.dumps(keys)
    for before, after in ids.items():
        text = text.replace(before, after)
    changed: dict[str, Key] = json.loads(text)
    return changed


def as_of(time_us: int, keys: dict[str, Key]) -> dict[str, Key]:
    """Move the times (µs) so that the earliest is `time_us`: what a state means depends on its age."""
    text, times = json.dumps(keys), r"(?<!\d)1[5-9]\d{14}(?!\d)"
    moved_us = time_us - min(map(int, re.findall(times, text)), default=time_us)
    moved: dict[str, Key] = json.loads(re.sub(times, lambda time: str(int(time[0]) + moved_us), text))
    return moved


def thaw(client: redis.Redis, keys: dict[str, Key]) -> None:
    """Write frozen keys into an empty database, as if written a second ago. Those with an expiry live for an hour."""
    now_seconds, microseconds = client.time()
    second_ago_us = (now_seconds - 1) * 1_000_000 + microseconds
    ids = {f"<{of}>": own for of, own in ids_of(client).items()}
    for key, found in with_ids(as_of(second_ago_us, keys), ids).items():
        value = found["value"]
        write: dict[str, Callable[[], Any]] = {
            "string": lambda: client.set(key, value),  # noqa: B023  # called in this round
            "hash": lambda: client.hset(key, mapping=value),  # noqa: B023
            "zset": lambda: client.zadd(key, dict(value)),  # noqa: B023
            "set": lambda: client.sadd(key, *value),  # noqa: B023
            "list": lambda: client.rpush(key, *value),  # noqa: B023
        }
        write[found["type"]]()
        if found["expires"]:
            client.pexpire(key, TTL)


def operator_store(server: Server) -> OperatorStore:
    return open_operator_store((StoreLocation.of(server.url(0)),), timeout=5, prefix="dlock")


def write_states(server: Server) -> dict[str, dict[str, Key]]:
    """Return the keys of each state, as this version writes them."""
    states = {}
    with server.client() as client:
        for state, (name, write) in STATES.items():
            client.flushdb()
            with closing(operator_store(server)) as store:
                write(store, name)
            states[state] = frozen(client)
    return states


def task() -> Any:
    """Return a task that permits the options of a call."""
    app = Celery(set_as_current=False)
    app.conf.update(dlock_url="memory://", dlock_call_options="all")

    @singleton_task(app=app, name="app.post")
    def post(n: int) -> None: ...

    app.finalize()
    return app.tasks["app.post"]


def write_messages() -> dict[str, Any]:
    """Return headers of messages, and the record of a worker, as this version writes them."""
    digest = Identity("id1", 1).digest
    return {
        "ranked": RepublishHeader(RANK_US, 3, "7", redelivered=True).fields(digest),
        "unranked": RepublishHeader(None, 2, "7", 1, first_receipt=RECEIPT).fields(digest),
        "called": headers_for(task(), CALL_OPTIONS, None),
        "sent": with_sent_time({}),
        "tick": header_for("app.post", *TICK),
        "worker": RECORD.text,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "server") as running:
        wire = {"wire": WIRE_VERSION, "states": write_states(running), "messages": write_messages()}
    Path(sys.argv[1]).write_text(json.dumps(wire, indent=1, sort_keys=True) + "\n")
