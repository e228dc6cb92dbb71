"""The commands of the Redis store: each value goes where the script's header names it."""

import inspect
import itertools
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import AcquireRequest, Grant, Identity, QueueRequest, Renewal, Requester
from celery_dlock.store.queue_model import ClaimRequest
from celery_dlock.store.redis import commands, scripts
from celery_dlock.store.redis.commands import Command
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import Script

NAME = shared_name("x")
KEYS = LockKeys.of("dlock", NAME)
IDENTITY = Identity("message")
DIGEST = IDENTITY.digest
REQUESTER = Requester("app.post", "id", "node1", "77")
WAITING, MESSAGES, DELAYED, QUEUES = KEYS.queue()
BOTH = (False, True)

Values = dict[str, str]
Case = tuple[str, Command, Values]

CALLER: Values = {"task": "app.post", "task_id": "id", "node": "node1", "pid": "77"}
LOCK: Values = {"lock": KEYS.lock, "last_token": KEYS.last, "tombstone": KEYS.tombstone("o.1"), "acquisition": "o.1"}
QUEUE: Values = {"waiting": WAITING, "messages": MESSAGES, "delayed": DELAYED, "queues": QUEUES, "lock_name": KEYS.name}
ONCE: Values = {"run": KEYS.run("t"), "requester_json": REQUESTER.text}
QUARANTINE: Values = {"quarantine_record": KEYS.quarantine(), "quarantine_ms": "5000", "failover_epoch": "6"}


def acquires() -> Iterator[Case]:
    for message, once, quarantine in itertools.product(BOTH, repeat=3):
        if once and not message:
            continue
        request = AcquireRequest(
            REQUESTER, IDENTITY if message else None, True, False, 11, 12, once, "t", 13, True, True, 14
        )
        terms = ("5000", "6") if quarantine else ()
        values = {
            **LOCK, **CALLER, "ttl_ms": "10", "redelivered": "1", "may_be_copied": "1", "age_us": "11",
            "rank_us": "12", "notify": "s", "min_hold_ms": "14", "identity": DIGEST if message else "",
            **({"done": KEYS.done(DIGEST)} if message else {}),
            **(ONCE | {"run_mark_ms": "13", "hold_if_unknown": "1"} if once else {}),
            **(QUARANTINE if quarantine else {}),
        }  # fmt: skip
        yield "acquire", commands.acquire(KEYS, "o.1", 10, request, "s", terms), values
        if message:
            place = QueueRequest("entry", 15, True, 16, "turn")
            queued = commands.acquire(KEYS, "o.1", 10, request._replace(queue=place), "s", terms)
            more = {"dead": KEYS.dead(), "message": "entry", "limit": "15", "evict_oldest": "1", "after_us": "16"}
            yield "acquire_queued", queued, {**values, **QUEUE, **more, "grant_id": "turn"}


def releases() -> Iterator[Case]:
    for queue, message, once, reserve in itertools.product(BOTH, repeat=4):
        if once and not message:
            continue
        request = ReleaseRequest(
            final=True, identity=DIGEST if message else "", used_ms=11 if once else 0, requester=REQUESTER.text,
            outcome_unknown=True, queue=queue, once=once, tick="t", seed="seed", window_ms=12,
            reserved_for="heir" if reserve else "", reserved_ms=13, rolled_back=True,
        )  # fmt: skip
        values = {
            **LOCK, "channel": KEYS.channel, "tombstone_ms": str(commands.TOMBSTONE_MS), "rolled_back": "1",
            **({"identity": request.identity} if queue or once else {}),
            **({"done": KEYS.done(DIGEST), "done_ms": str(commands.DONE_MS)} if message else {}),
            **(ONCE | {"used_ms": "11", "seed": "seed", "seed_ms": "12"} if once else {}),
            **({"reserved_for": "heir", "reserve_ms": "13"} if reserve else {}),
            **(QUEUE if queue else {}),
        }  # fmt: skip
        del values["last_token"]
        yield "release_queued" if queue else "release", commands.release(KEYS, "o.1", request), values


def leases() -> Iterator[Case]:
    lock = {"lock": KEYS.lock}
    renewal = Renewal(NAME, "o.1", 10, (("count", "2"), ("releasing", "1")))
    renewed = {**lock, "acquisition": "o.1", "ttl_ms": "10", "facts": "count 2 releasing 1"}
    yield "renew", commands.renew(KEYS, renewal), renewed
    yield "inspect", commands.inspect(KEYS), lock
    token = {**lock, "last_token": KEYS.last, "acquisition": "o.1", "token": "7"}
    yield "adopt_token", commands.adopt_token(KEYS, "o.1", 7, "", "t"), token
    seeded = {**token, "run": KEYS.run("t"), "seed": "7/s"}
    yield "adopt_token", commands.adopt_token(KEYS, "o.1", 7, "7/s", "t"), seeded
    record = {"quarantine_record": KEYS.quarantine(), "quarantine_ms": "5000", "failover_epoch": "6"}
    yield "start_quarantine", commands.start_quarantine(KEYS.quarantine(), "5000", "6"), record


def runs() -> Iterator[Case]:
    lock = {"lock": KEYS.lock}
    run = {"run": KEYS.run("t")}
    yield "last_run", commands.last_run(KEYS, "t"), {**lock, **run}
    yield "forget_run", commands.forget_run(KEYS, "t"), {**run, "life_ms": str(commands.TOMBSTONE_MS)}
    resolved = {**lock, **run, "state": "cleared", "window_ms": "9"}
    yield "resolve_run", commands.resolve_run(KEYS, sent=False, window_ms=9, tick="t"), resolved
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
    queue = {**lock, **QUEUE, "dead": KEYS.dead(), "channel": KEYS.channel}
    swept = {**queue, "granter": "s.1", "grant_timeout_ms": "4", "max_tries": "5", "foreign_ms": "6"}
    yield "sweep", commands.sweep(KEYS, "s.1", 4, 5, 6), swept
    granted = {**lock, "queues": QUEUES, "identity": DIGEST, "lock_name": KEYS.name}
    confirmed = {**granted, "messages": MESSAGES, "grant_timeout_ms": "4"}
    yield "confirm_publish", commands.confirm_publish(KEYS, DIGEST, 4), confirmed
    passed = {**granted, "grant_id": "turn", "foreign": "2"}
    yield "pass_on", commands.pass_on(KEYS, Grant(DIGEST, "e", "turn"), foreign=True, present=True), passed
    removed = {**queue, "done": KEYS.done(DIGEST), "identity": DIGEST, "granter": "s.1", "ended": "1"}
    removed["done_ms"] = str(commands.DONE_MS)
    yield "remove_waiter", commands.remove_waiter(KEYS, DIGEST, "s.1", dead_letter=False, ended=True), removed
    yield "list_waiters", commands.list_waiters(KEYS, 5), {**lock, **waiters, "limit": "5"}


def workers() -> Iterator[Case]:
    due = commands.list_due_queues(["i1", "i2"], 5, 6)
    yield "list_due_queues", due, {"indexes": "i1 i2", "limit": "5", "within_us": "6"}
    lease = {"sweeper": "key", "worker": "w", "life_ms": "7"}
    yield "sweep_lease", commands.sweep_lease("key", "w", 7), lease
    saved = {"worker": "key", "process": "p", "record": "r", "life_ms": "7"}
    yield "save_worker_record", commands.save_worker_record("key", "p", "r", 7), saved


CASES = [*acquires(), *releases(), *leases(), *runs(), *claims(), *queues(), *workers()]
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


@pytest.mark.parametrize("name", [name for name in commands.__all__ if name.islower()])
def test_builder_parameters_are_records_or_names_of_the_header(name: str) -> None:
    """A parameter that the header does not name is a record, a flag that becomes an argument, or part of a key."""
    builder = getattr(commands, name)
    (script,) = (one for one in SCRIPTS if one.name == name)
    header = {one.name for one in (*script.keys, *script.args)}
    hints = typing.get_type_hints(builder)
    plain = {one for one in inspect.signature(builder).parameters if not names_of(hints[one])}
    assert plain - header <= {"quarantine", "tick", "sent", "present", "dead_letter"}
