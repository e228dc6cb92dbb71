"""The commands of the Redis store: each value goes where the script's header names it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.keys.lock_name import ONE_LOCK, ONE_SEAT
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import (
    RETRY,
    Acquired,
    AcquireRequest,
    Debounce,
    Identity,
    QueueRequest,
    Released,
    Renewal,
    Replace,
    Requester,
)
from celery_dlock.store.redis import commands
from celery_dlock.store.redis.commands import Command
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import SCRIPTS, Script
from celery_dlock.store.redis.scripts.seated import SEAT_SCRIPTS
from celery_dlock.store.redis.store import RedisStore
from tests.support.scripts import all_variants

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
ONCE: Values = {"run": KEYS.run("t"), "unsettled": KEYS.named("unsettled"), "requester_json": REQUESTER.text}
QUARANTINE: Values = {"quarantine": KEYS.named("quarantine"), "quarantine_ms": "5000", "failover_epoch": "6"}


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
        yield "acquire", commands.acquire(KEYS, ONE_LOCK, "o.1", 10, request, terms), acquired
        if message:
            place = QueueRequest("entry", 15, True, 16, "turn", sent_us=21, park_duplicate=True)
            queued = commands.acquire(KEYS, ONE_LOCK, "o.1", 10, request._replace(queue=place), terms)
            more = {
                "dead": KEYS.named("dead"),
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
            debounced = {"debounced": KEYS.named("debounced"), "debounce_ms": "17", "debounce_max_ms": "18"}
            replaced = {"replaced": KEYS.named("replaced"), "replace_max_ms": "19", "is_retry": "1"}
            for waits, sent in (
                (place._replace(debounce=Debounce(17, 18)), debounced),
                (place._replace(replace=Replace(19, RETRY)), replaced),
                (place._replace(debounce=Debounce(17, 18), replace=Replace(19, RETRY)), debounced | replaced),
            ):
                command = commands.acquire(KEYS, ONE_LOCK, "o.1", 10, request._replace(queue=waits), terms)
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
        yield "release_queued" if queue else "release", commands.release(KEYS, ONE_LOCK, "o.1", request), values
        if queue and message:
            stopped = {"replaced": KEYS.named("replaced"), "body_ended": "0"}
            ending = request._replace(replace="stopped")
            yield "release_queued", commands.release(KEYS, ONE_LOCK, "o.1", ending), values | stopped


def leases() -> Iterator[Case]:
    lock = {"lock": KEYS.lock}
    renewal = Renewal(NAME, "o.1", 10, (("count", "2"), ("releasing", "1")))
    renewed = {**lock, "acquisition": "o.1", "ttl_ms": "10", "facts": "count 2 releasing 1"}
    yield "renew", commands.renew(KEYS.lock, renewal), renewed
    yield "renew", commands.renew(KEYS.lock, renewal._replace(stoppable=True)), renewed


CASES = [*acquires(), *releases(), *leases()]


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
    script = SCRIPTS[name]
    assert command[0] in script.variants.values()
    assert by_name(script, command) == expected


def test_cases_cover_every_variant_of_their_scripts() -> None:
    covered = {command[0] for _, command, _ in CASES}
    assert covered == {variant for name, *_ in CASES for variant in all_variants(SCRIPTS[name])}


def test_command_sends_values_under_the_names_of_the_header() -> None:
    given = {"granter": "s.1", "grant_timeout_ms": 4, "max_tries": 5, "foreign_ms": 6, "pause_ms": True}
    dead = {"dead": KEYS.named("dead"), "dead_letters": KEYS.named("dead_letters")}
    expected = {**QUEUE, **dead, "lock": KEYS.lock, "wake": KEYS.wake, "seats": KEYS.named("seats")}
    expected |= {
        "absent": KEYS.named("absent"),
        **{name: str(int(one)) for name, one in given.items() if name != "granter"},
    }
    sent = commands.command("sweep", KEYS, **given)
    assert by_name(SCRIPTS["sweep"], sent) == {**expected, "granter": "s.1"}
    on_seat = commands.command("sweep", KEYS, seats=3, **given)
    assert by_name(SEAT_SCRIPTS["sweep"], on_seat) == {**expected, "granter": "s.1", "seat_limit": "3"}
    assert commands.command("sweep", KEYS, seats=ONE_SEAT, **given) == sent


def test_command_spreads_the_keys_of_a_variadic_name() -> None:
    due = commands.command("list_due_queues", None, indexes=["i1", "i2"], limit=5, within_us=6)
    assert due == (SCRIPTS["list_due_queues"].variant(), ("i1", "i2", "5", "6"))


def test_command_with_groups_has_their_keys_and_arguments() -> None:
    given = {"task_id": "a", "generation": 3, "tombstone": "t", "attempt": "try", "tombstone_ms": 9}
    undone = commands.command("release_claim", KEYS, "unconfirmed", **given)
    expected = {**given, "claim": KEYS.named("claim"), "generation": "3", "tombstone_ms": "9"}
    assert by_name(SCRIPTS["release_claim"], undone) == expected


def test_command_with_a_missing_name_is_refused() -> None:
    with pytest.raises(KeyError, match="within_us"):
        commands.command("list_due_queues", None, indexes=["i1"], limit=5)


@pytest.mark.parametrize("script", [*SCRIPTS.values(), *SEAT_SCRIPTS.values()], ids=lambda script: script.name)
def test_each_key_in_a_header_has_a_kind_or_needs_more_than_the_lock_name(script: Script) -> None:
    more = {"audit", "done", "indexes", "last_token", "lock", "run", "sweeper", "tombstone", "worker"}
    for key in script.keys:
        assert key.name in more or KEYS.named(key.name)


@pytest.mark.parametrize(("_name", "command", "_expected"), CASES)
def test_packed_command_has_the_lengths_of_the_header(_name: str, command: Command, _expected: Values) -> None:
    variant, texts = command
    head, _, rest = variant.packed(texts).partition(b"\r\n")
    assert head == b"*%d" % (3 + len(texts))
    count = int(rest.split(b"\r\n")[5])
    assert (count, len(texts) - count) == (len(variant.keys), len(variant.args)) or script_is_variadic(variant.name)


def script_is_variadic(name: str) -> bool:
    script = SCRIPTS[name]
    return any(one.variadic for one in (*script.keys, *script.args))


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
    acquire = ("EVALSHA", SCRIPTS["acquire"].variant("message").sha, "4", KEYS.lock, KEYS.last, KEYS.tombstone("o.1"))
    acquire += (KEYS.done(DIGEST), "o.1", "30000", DIGEST, "11", "0", "app.post", "id", "node1 77")
    release = ("EVALSHA", SCRIPTS["release"].variant("message").sha, "3", KEYS.lock, KEYS.wake)
    release += (KEYS.done(DIGEST), "o.1", str(commands.DONE_MS))
    assert topology.sent == [packed(acquire), packed(release)]


def packed(words: Sequence[str]) -> bytes:
    """Return the command as RESP, without the prepared heads of the scripts."""
    return b"".join([b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(word), word.encode()) for word in words)])
