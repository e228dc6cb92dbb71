"""The commands of the Redis store: each value goes where the script's header names it."""

import inspect
import itertools
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.claim_model import ClaimRequest
from celery_dlock.store.model import (
    Acquired,
    AcquireRequest,
    Grant,
    Identity,
    QueueRequest,
    Released,
    Renewal,
    Requester,
)
from celery_dlock.store.redis import commands, operator_commands, scripts
from celery_dlock.store.redis.commands import Command
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import Script
from celery_dlock.store.redis.store import RedisStore

NAME = shared_name("x")
KEYS = LockKeys.of("dlock", NAME)
IDENTITY = Identity("message")
DIGEST = IDENTITY.digest
REQUESTER = Requester("app.post", "id", "node1", "77")
WAITING, MESSAGES, DELAYED, QUEUES = KEYS.queue()
BOTH = (False, True)

Values = dict[str, str]
Case = tuple[str, Command, Values]

CALLER: Values = {"task": "app.post", "task_id": "id", "process": "node1 77"}
LOCK: Values = {"lock": KEYS.lock, "last_token": KEYS.last, "tombstone": KEYS.tombstone("o.1"), "acquisition": "o.1"}
QUEUE: Values = {"waiting": WAITING, "messages": MESSAGES, "delayed": DELAYED, "queues": QUEUES, "lock_name": KEYS.name}
ONCE: Values = {"run": KEYS.run("t"), "unsettled": KEYS.unsettled(), "requester_json": REQUESTER.text}
QUARANTINE: Values = {"quarantine_record": KEYS.quarantine(), "quarantine_ms": "5000", "failover_epoch": "6"}


def acquires() -> Iterator[Case]:
    for message, once, again, hold, quarantine in itertools.product(BOTH, repeat=5):
        if once and not message:
            continue
        request = AcquireRequest(
            REQUESTER, IDENTITY if message else None, again, False, 11, 12 if again else None, once, "t", 13,
            hold_if_unknown=True, notify=True, waited=True, min_hold_ms=14 if hold else 0,
            doubt_us=20 if again else 0,
        )  # fmt: skip
        terms = ("5000", "6") if quarantine else ()
        values = {
            **LOCK, **CALLER, "ttl_ms": "10", "age_us": "11", "notify": "2", "identity": DIGEST if message else "",
            **({"done": KEYS.done(DIGEST)} if message else {}),
            **(ONCE | {"run_mark_ms": "13", "hold_if_unknown": "1"} if once else {}),
            **(QUARANTINE if quarantine else {}),
            **({"min_hold_ms": "14"} if hold else {}),
        }  # fmt: skip
        copy = {"redelivered": "1", "may_be_copied": "1", "rank_us": "12", "doubt_us": "20"}
        acquired = values | copy if again else values
        yield "acquire", commands.acquire(KEYS, "o.1", 10, request, terms), acquired
        if message:
            place = QueueRequest("entry", 15, True, 16, "turn", sent_us=21, park_duplicate=True)
            queued = commands.acquire(KEYS, "o.1", 10, request._replace(queue=place), terms)
            more = {
                "dead": KEYS.dead(),
                "wake": KEYS.wake,
                "message": "entry",
                "queue_limit": "15",
                "evict_oldest": "1",
                "after_us": "16",
                "sent_us": "21",
                "park_duplicate": "1",
            }
            new = {"redelivered": "0", "may_be_copied": "0", "rank_us": "", "doubt_us": "0"}
            asked = {**values, **(copy if again else new), **QUEUE, **more, "grant_id": "turn"}
            yield "acquire_queued", queued, asked
            debounced = {"debounced": KEYS.debounced(), "debounce_ms": "17", "debounce_max_ms": "18"}
            replaced = {"replaced": KEYS.replaced(), "replace_max_ms": "19", "is_retry": "1"}
            for waits, sent in (
                (place._replace(debounce=(17, 18)), debounced),
                (place._replace(replace=(19, 1)), replaced),
                (place._replace(debounce=(17, 18), replace=(19, 1)), debounced | replaced),
            ):
                command = commands.acquire(KEYS, "o.1", 10, request._replace(queue=waits), terms)
                yield "acquire_queued", command, asked | sent


def releases() -> Iterator[Case]:
    for queue, message, once, unconfirmed, reserve in itertools.product(BOTH, repeat=5):
        if once and not message:
            continue
        request = ReleaseRequest(
            final=True, identity=DIGEST if message else "", used_ms=11 if once else 0, requester=REQUESTER.text,
            outcome_unknown=unconfirmed, queue=queue, once=once, tick="t", seed="seed", window_ms=12,
            reserved_for="successor" if reserve else "", reserved_ms=13, rolled_back=unconfirmed,
        )  # fmt: skip
        values = {
            **LOCK, "wake": KEYS.wake,
            **({"tombstone_ms": str(commands.TOMBSTONE_MS), "rolled_back": "1"} if unconfirmed else {}),
            **({"identity": request.identity} if queue or once else {}),
            **({"done": KEYS.done(DIGEST), "done_ms": str(commands.DONE_MS)} if message else {}),
            **(ONCE | {"used_ms": "11", "seed": "seed", "seed_ms": "12"} if once else {}),
            **({"reserved_for": "successor", "reserve_ms": "13"} if reserve else {}),
            **(QUEUE if queue else {}),
        }  # fmt: skip
        del values["last_token"]
        if not unconfirmed:
            del values["tombstone"]
        yield "release_queued" if queue else "release", commands.release(KEYS, "o.1", request), values
        if queue and message:
            stopped = {"replaced": KEYS.replaced(), "body_ended": "0"}
            ending = request._replace(replace="stopped")
            yield "release_queued", commands.release(KEYS, "o.1", ending), values | stopped


def leases() -> Iterator[Case]:
    lock = {"lock": KEYS.lock}
    renewal = Renewal(NAME, "o.1", 10, (("count", "2"), ("releasing", "1")))
    renewed = {**lock, "acquisition": "o.1", "ttl_ms": "10", "facts": "count 2 releasing 1"}
    yield "renew", commands.renew(KEYS.lock, renewal), renewed
    yield "renew", commands.renew(KEYS.lock, renewal._replace(stoppable=True)), renewed
    yield "inspect", commands.inspect(KEYS), lock
    token = {**lock, "last_token": KEYS.last, "acquisition": "o.1", "token": "7"}
    yield "adopt_token", commands.adopt_token(KEYS, "o.1", 7, "", "t", waited=False), token
    yield "pass_on_wake", commands.pass_on_wake(KEYS), {"wake": KEYS.wake}
    seeded = {**token, "run": KEYS.run("t"), "seed": "7/s"}
    yield "adopt_token", commands.adopt_token(KEYS, "o.1", 7, "", "t", waited=True), token
    yield "adopt_token", commands.adopt_token(KEYS, "o.1", 7, "7/s", "t", waited=False), seeded
    yield "adopt_token", commands.adopt_token(KEYS, "o.1", 7, "7/s", "t", waited=True), seeded
    record = {"quarantine_record": KEYS.quarantine(), "quarantine_ms": "5000", "failover_epoch": "6"}
    yield "start_quarantine", commands.start_quarantine(KEYS.quarantine(), "5000", "6"), record


def runs() -> Iterator[Case]:
    lock = {"lock": KEYS.lock}
    run = {"run": KEYS.run("t")}
    yield "last_run", commands.last_run(KEYS, "t"), {**lock, **run}
    run["unsettled"] = KEYS.unsettled()
    forgotten = {"shown_mark": "o.1", "life_ms": str(commands.TOMBSTONE_MS)}
    yield "forget_run", commands.forget_run(KEYS, "t", "o.1"), {**lock, **run, **forgotten}
    resolved = {**lock, **run, "shown_mark": "o.1", "state": "cleared", "window_ms": "9"}
    yield "resolve_run", commands.resolve_run(KEYS, sent=False, window_ms=9, tick="t", shown_mark="o.1"), resolved
    done = {"done": KEYS.done(DIGEST), "identity": DIGEST, "owner": "o", "age_us": "8"}
    marked = {**lock, **done, "life_ms": str(commands.DONE_MS)}
    yield "mark_done", commands.mark_done(KEYS, DIGEST, "o", 8), marked


def claims() -> Iterator[Case]:
    lock = {"lock": KEYS.lock}
    claimed = {"claim": KEYS.claim(), "task_id": "a"}
    request = ClaimRequest("a", 3, 10, True, REQUESTER, "try")
    waiters = {"waiting": WAITING, "messages": MESSAGES, "delayed": DELAYED}
    claim = {**lock, **claimed, **waiters, "tombstone": KEYS.tombstone("try"), "attempt": "try", "life_ms": "10"}
    claim |= {"while_running": "1", "generation": "3", "task": "app.post", "node": "node1", "short_id": "id"}
    yield "claim", commands.claim(KEYS, request), claim
    released = {**claimed, "generation": "3"}
    yield "release_claim", commands.release_claim(KEYS, "a", 3, ""), released
    attempt = {"tombstone": KEYS.tombstone("try"), "attempt": "try", "tombstone_ms": str(commands.TOMBSTONE_MS)}
    yield "release_claim", commands.release_claim(KEYS, "a", 3, "try"), {**released, **attempt}
    yield "extend_claim", commands.extend_claim(KEYS, "a", 10), {**claimed, "life_ms": "10"}


def queues() -> Iterator[Case]:
    lock = {"lock": KEYS.lock}
    waiters = {"waiting": WAITING, "messages": MESSAGES, "delayed": DELAYED}
    dead = {"dead": KEYS.dead(), "dead_letters": KEYS.dead_letters()}
    queue = {**lock, **QUEUE, **dead, "absent": KEYS.absent()}
    swept = {**queue, "wake": KEYS.wake, "granter": "s.1", "grant_timeout_ms": "4", "max_tries": "5", "foreign_ms": "6"}
    swept |= {"seats_record": KEYS.seats_record(), "pause_ms": "7"}
    yield "sweep", commands.sweep(KEYS, "s.1", 4, 5, 6, 7), swept
    granted = {**lock, "queues": QUEUES, "identity": DIGEST, "lock_name": KEYS.name}
    confirmed = {**granted, "messages": MESSAGES, "grant_timeout_ms": "4"}
    yield "confirm_publish", commands.confirm_publish(KEYS, DIGEST, 4), confirmed
    passed = {**granted, "grant_id": "turn", "foreign": "2"}
    yield "decline_grant", commands.decline_grant(KEYS, Grant(DIGEST, "e", "turn"), foreign=True, present=True), passed
    removed = {
        **queue,
        "wake": KEYS.wake,
        "done": KEYS.done(DIGEST),
        "identity": DIGEST,
        "granter": "s.1",
        "ended": "1",
    }
    removed["done_ms"] = str(commands.DONE_MS)
    yield "remove_waiter", commands.remove_waiter(KEYS, DIGEST, "s.1", dead_letter=False, ended=True), removed
    yield (
        "list_waiters",
        commands.list_waiters(KEYS, 5),
        {**lock, **waiters, "debounced": KEYS.debounced(), "limit": "5"},
    )


def workers() -> Iterator[Case]:
    due = commands.list_due_queues(["i1", "i2"], 5, 6)
    yield "list_due_queues", due, {"indexes": "i1 i2", "limit": "5", "within_us": "6"}
    lease = {"sweeper": "key", "worker": "w", "life_ms": "7"}
    yield "sweep_lease", commands.sweep_lease("key", "w", 7), lease
    saved = {"worker": "key", "process": "p", "record": "r", "life_ms": "7"}
    yield "save_worker_record", commands.save_worker_record("key", "p", "r", 7), saved


def operators() -> Iterator[Case]:
    lock = {"lock": KEYS.lock}
    waiters = {"waiting": WAITING, "delayed": DELAYED}
    run = {"run": KEYS.run("t")}
    seen = {**lock, **run, **waiters, "claim": KEYS.claim(), "dead": KEYS.dead()}
    yield "describe", operator_commands.describe(KEYS, "t"), seen
    index = operator_commands.list_index(["i1", "i2"], 5, 6)
    yield "list_index", index, {"indexes": "i1 i2", "first": "5", "last": "6"}
    yield "check_run", operator_commands.check_run(KEYS, "t"), {**lock, **run, "unsettled": KEYS.unsettled()}
    dead = {"dead": KEYS.dead(), "dead_letters": KEYS.dead_letters(), "lock_name": KEYS.name, "identity": DIGEST}
    yield "check_dead_letter", operator_commands.check_dead_letter(KEYS, DIGEST), dead
    freed = {**lock, **QUEUE, "wake": KEYS.wake, "acquisition": "o.1", "token": "7", "force": "1"}
    yield "free_lock", operator_commands.free_lock(KEYS, "o.1", "7", force=True), freed
    held = {**lock, **waiters, "queues": QUEUES, "absent": KEYS.absent(), "lock_name": KEYS.name}
    held |= {"operator": "operator:a@h", "hold_ms": "9", "reason": "why"}
    yield "hold_lock", operator_commands.hold_lock(KEYS, "operator:a@h", 9, "why"), held
    cancelled = {**lock, "acquisition": "o.1", "asked": "7"}
    yield "cancel_hold", operator_commands.cancel_hold(KEYS, "o.1", "7"), cancelled
    again = {**dead, "waiting": WAITING, "messages": MESSAGES, "queues": QUEUES, "absent": KEYS.absent()}
    yield "requeue", operator_commands.requeue(KEYS, DIGEST), again
    saved = {"audit": "key", "at_us": "5", "record": "{}", "limit": "9"}
    yield "save_audit", operator_commands.save_audit("key", 5, "{}", 9), saved


CASES = [*acquires(), *releases(), *leases(), *runs(), *claims(), *queues(), *workers(), *operators()]
SCRIPTS = [script for script in vars(scripts).values() if isinstance(script, Script)]


def by_name(script: Script, command: Command) -> Values:
    """Return what the command sends, by the names in the header. Values of a variadic name are joined."""
    variant, texts = command
    names = [*variant.keys, *variant.args]
    variadic = {one.name for one in (*script.keys, *script.args) if one.variadic}
    extra = len(texts) - len(names)
    spread = [name for name in names for _ in range(1 + (extra if name in variadic else 0))]
    sent: Values = {}
    for name, text in zip(spread, texts, strict=True):
        sent[name] = f"{sent[name]} {text}" if name in sent else text
    return sent


@pytest.mark.parametrize(("name", "command", "expected"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)])
def test_command_sends_each_value_under_the_name_in_the_header(name: str, command: Command, expected: Values) -> None:
    (script,) = (one for one in SCRIPTS if one.name == name)
    assert command[0] in script.variants.values()
    sent = by_name(script, command)
    if name in ("forget_run", "resolve_run"):
        assert len(sent.pop("command_id")) == 32
    assert sent == expected


def test_cases_cover_every_variant_of_every_script() -> None:
    covered = {command[0] for _, command, _ in CASES}
    assert covered == {variant for script in SCRIPTS for variant in script.all_variants()}


@pytest.mark.parametrize(("_name", "command", "_expected"), CASES)
def test_packed_command_has_the_lengths_of_the_header(_name: str, command: Command, _expected: Values) -> None:
    variant, texts = command
    head, _, rest = variant.packed(texts).partition(b"\r\n")
    assert head == b"*%d" % (3 + len(texts))
    count = int(rest.split(b"\r\n")[5])
    assert (count, len(texts) - count) == (len(variant.keys), len(variant.args)) or script_is_variadic(variant.name)


def script_is_variadic(name: str) -> bool:
    (script,) = (one for one in SCRIPTS if one.name == name)
    return any(one.variadic for one in (*script.keys, *script.args))


def names_of(annotation: Any) -> set[str]:
    """The names of the fields of a record."""
    return set(getattr(annotation, "_fields", ()))


BUILDERS = {name: getattr(module, name) for module in (commands, operator_commands) for name in module.__all__}


@pytest.mark.parametrize("name", [name for name in BUILDERS if name.islower()])
def test_builder_parameters_are_records_or_names_of_the_header(name: str) -> None:
    """A parameter that the header does not name is a record, a flag that becomes an argument, or part of a key."""
    builder = BUILDERS[name]
    (script,) = (one for one in SCRIPTS if one.name == name)
    header = {one.name for one in (*script.keys, *script.args)}
    hints = typing.get_type_hints(builder)
    plain = {one for one in inspect.signature(builder).parameters if not names_of(hints[one])}
    assert plain - header <= {"quarantine", "tick", "sent", "present", "dead_letter", "waited"}


class FakeTopology:
    """A server that answers each command with the next reply, and records the bytes that it received."""

    clustered = False

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.sent: list[bytes] = []

    def call(self, _key: str, operation: Any, *args: Any) -> Any:
        return operation(self, *args)

    def ask(self, command: bytes) -> Any:
        self.sent.append(command)
        return self.replies.pop(0)


def test_plain_acquire_and_release_send_one_command_of_15_and_8_words() -> None:
    """Expected: these bytes. More words cost every task, in the child and in the server."""
    topology: Any = FakeTopology(b"7 1700000000000000 -", 1)
    store = RedisStore(topology, "dlock")
    acquired = store.acquire(NAME, "o.1", 30_000, AcquireRequest(REQUESTER, IDENTITY, age_us=11))
    assert isinstance(acquired, Acquired)
    assert (acquired.token, acquired.rank_us) == (7, 1_700_000_000_000_000 - 11)
    assert store.release(NAME, "o.1", ReleaseRequest(final=True, identity=DIGEST)) == Released(True, False)
    acquire = ("EVALSHA", scripts.ACQUIRE.variant("message").sha, "4", KEYS.lock, KEYS.last, KEYS.tombstone("o.1"))
    acquire += (KEYS.done(DIGEST), "o.1", "30000", DIGEST, "11", "0", "app.post", "id", "node1 77")
    release = ("EVALSHA", scripts.RELEASE.variant("message").sha, "3", KEYS.lock, KEYS.wake)
    release += (KEYS.done(DIGEST), "o.1", str(commands.DONE_MS))
    assert topology.sent == [packed(acquire), packed(release)]


def packed(words: Sequence[str]) -> bytes:
    """Return the command as RESP, without the prepared heads of the scripts."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word.encode()) for word in words)])
