"""Today's code understands the store as earlier versions wrote it, and writes the wire that it declares."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from celery_dlock.keys.lock_name import LockName
from celery_dlock.messaging.message import RepublishHeader, sent_us
from celery_dlock.messaging.parked import ParkedMessage
from celery_dlock.messaging.tick_header import tick_of
from celery_dlock.messaging.wire import WIRE_VERSION
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.model import Acquired, Duplicate, Identity, Renewal, Requester, StopRequest, Unknown, Used
from celery_dlock.store.operator import OperatorStore
from celery_dlock.task.call_options import call_of
from celery_dlock.worker.crash_record import WorkerRecord
from tests.support.servers import Server
from tests.wire.states import (
    BROKER,
    CALL_OPTIONS,
    RANK_US,
    RECEIPT,
    RECORD,
    STATES,
    TICK,
    TTL,
    audit_of,
    ending,
    operator_store,
    quarantine_left_ms,
    request,
    task,
    thaw,
    write_messages,
    write_states,
)

FROZEN: Final = sorted((Path(__file__).parent / "frozen").glob("wire-*.json"))
CASES: Final = [
    pytest.param(frozen, state, id=f"{frozen.stem}-{state}")
    for frozen in FROZEN
    for state in json.loads(frozen.read_text())["states"]
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("wire")) as running:
        yield running


def digest(task_id: str) -> str:
    return Identity(task_id).digest


def next_call(entry: str) -> str:
    return ParkedMessage.read(entry).task_id


def released(store: OperatorStore, name: LockName) -> str:
    grant = store.release(name, "a.1", ending("id1", queue=True)).granted
    return next_call(grant.entry) if grant else ""


def swept(store: OperatorStore, name: LockName) -> str:
    grant = store.sweep(name, "sweep2", 5000, 10).granted
    return next_call(grant.entry) if grant else ""


def acquired(store: OperatorStore, name: LockName, **facts: Any) -> Any:
    return store.acquire(name, "c.1", TTL, request("id9", **facts))


def claims_again(store: OperatorStore, name: LockName) -> Any:
    by = Requester("app.post", "id9", "host1", "5")
    (existing,) = store.claim([(name, ClaimRequest("id9", 0, TTL, False, by, "p2"))])
    return existing and (existing.state, existing.task_id)


def held_by_the_operator(store: OperatorStore, name: LockName) -> Any:
    store.release(name, "a.1", ending("id1"))
    return acquired(store, name).holder.kind


def taken_by_the_retry(store: OperatorStore, name: LockName) -> Any:
    return type(store.acquire(name, "c.1", TTL, request("id1")._replace(identity=Identity("id1", 1))))


def last_action(store: OperatorStore, _: LockName) -> Any:
    (last,) = audit_of(store).records(10)
    return last.action, last.detail, last.user, last.host, last.reason


#: What the next call, worker or operator finds in each state.
NEXT: Final[dict[str, tuple[Callable[[OperatorStore, LockName], Any], Any]]] = {
    "held": (lambda store, name: store.release(name, "a.1", ending("id1")).ours, True),
    "waiting": (released, "id2"),
    "seated": (released, "id3"),
    "granted": (lambda store, name: store.confirm_publish(name, digest("id2"), 5000), True),
    "dead_letter": (lambda store, name: store.requeue(name, digest("id2")), True),
    "debounced": (swept, "id1"),
    "replacing": (lambda store, name: store.renew([Renewal(name, "a.1", TTL, (), True)]), [StopRequest("id2")]),
    "used": (lambda store, name: type(acquired(store, name, once=True)), Used),
    "published": (lambda store, name: store.confirm_publish(name, digest("id2"), 5000), True),
    "declined": (swept, "id2"),
    "noted": (lambda store, name: store.release(name, "a.1", ending("id1"))[:2], (True, True)),
    "to_be_held": (held_by_the_operator, "operator"),
    "started": (lambda store, name: type(acquired(store, name, once=True, hold_if_unknown=True)), Unknown),
    "unknown": (lambda store, name: type(acquired(store, name, once=True, hold_if_unknown=True)), Unknown),
    "used_tick": (lambda store, name: type(acquired(store, name, once=True, tick="t1")), Used),
    "claimed": (claims_again, ("queued", "id1")),
    "reserved": (taken_by_the_retry, Acquired),
    "kept": (lambda store, name: acquired(store, name).holder.kind, "min_hold"),
    "operated": (lambda store, name: acquired(store, name).holder.kind, "operator"),
    "done": (lambda store, name: type(store.acquire(name, "c.1", TTL, request("id1", redelivered=True))), Duplicate),
    "audited": (last_action, ("hold", "held for 60 s", "ada", "host1", "a deploy")),
    # The quarantine of this server ended a second ago. Without a record, one would begin.
    "quarantined": (lambda store, name: quarantine_left_ms(store, name) <= 0, True),
    "sweeping": (lambda store, name: store.sweep_lease(BROKER, "queues", "worker2", TTL) > 0, True),
    "announced": (lambda store, name: store.has_workers(BROKER), True),
    "crash_recorded": (lambda store, name: store.worker_records("node1"), {"worker1": RECORD.text}),
}


@pytest.mark.invariant("old-wire-is-understood")
@pytest.mark.parametrize(("frozen", "state"), CASES)
def test_state_that_an_earlier_version_wrote_is_understood(server: Server, frozen: Path, state: str) -> None:
    name, _ = STATES[state]
    ask, expected = NEXT[state]
    with server.client() as client, closing(operator_store(server)) as store:
        client.flushdb()
        thaw(client, json.loads(frozen.read_text())["states"][state])
        assert ask(store, name) == expected


def shape(written: Any) -> str:
    """The text without what differs from run to run: times, the ids of actions, what is left of a life of an hour."""
    text = re.sub(r'(?<=\\"id\\": \\")[0-9a-f]{32}', "ID", json.dumps(written, sort_keys=True))
    text = re.sub(r"(?<!\d)(\d{16}(\.0)?|\d{10}(\.\d+)?)(?!\d)", "TIME", text)
    return re.sub(r"(?<!\d)(3600\d{3}|359\d{4})(?!\d)", "LIFE", text)


@pytest.mark.invariant("old-wire-is-understood")
def test_this_version_writes_the_wire_that_is_frozen_for_it(server: Server) -> None:
    """If it fails, the wire has changed: raise ``WIRE_VERSION``, and freeze the new wire beside the old."""
    frozen = json.loads((Path(__file__).parent / "frozen" / f"wire-{WIRE_VERSION}.json").read_text())
    assert frozen["wire"] == WIRE_VERSION
    written = write_states(server)
    assert written.keys() == frozen["states"].keys() == NEXT.keys()
    for state, keys in frozen["states"].items():
        assert shape(written[state]) == shape(keys), state
    assert shape(write_messages()) == shape(frozen["messages"])


@pytest.mark.invariant("old-wire-is-understood")
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda frozen: frozen.stem)
def test_header_and_record_that_an_earlier_version_wrote_are_understood(frozen: Path) -> None:
    messages = json.loads(frozen.read_text())["messages"]
    identity = Identity("id1", 1)
    ranked = RepublishHeader.of(messages["ranked"], identity)
    assert ranked == RepublishHeader(RANK_US, 3, "7", 0, redelivered=True)
    unranked = RepublishHeader.of(messages["unranked"], identity)
    assert unranked == RepublishHeader(None, 2, "7", 1, first_receipt=RECEIPT)
    assert WorkerRecord.from_text(messages["worker"]) == RECORD
    call = call_of(task(), messages["called"])
    assert {name: getattr(call.options, name) for name in CALL_OPTIONS} == CALL_OPTIONS
    assert sent_us(messages["sent"]) == messages["sent"]["dlock_sent"] > 10**15
    assert tick_of("app.post", messages["tick"], TICK.due) == TICK
