"""A script that stops after any of its writes: nothing stays for ever, no call is lost, no lock has two holders."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import pytest
import redis

from celery_dlock.errors import StoreRefused
from celery_dlock.keys.lock_name import LockName
from celery_dlock.store.claim_model import ClaimExtension, ClaimRequest
from celery_dlock.store.factory import open_operator_store
from celery_dlock.store.location import StoreLocation
from celery_dlock.store.model import Debounce, Grant, Renewal, Replace, Requester
from celery_dlock.store.redis.commands import command
from celery_dlock.store.redis.operator import RedisOperatorStore
from celery_dlock.store.redis.scripts import SCRIPTS
from celery_dlock.store.redis.scripts.seated import SEAT_SCRIPTS
from tests.contract.cut_scripts import READS, Cutter, World
from tests.contract.queue_helpers import NAME, TTL, TURN, digest
from tests.support.processes import HOST
from tests.support.servers import LOCK_PASSWORD, LOCK_RIGHTS, Server

#: Writes after which no script of these tests goes on.
MOST_WRITES: Final = 40
#: A name with three seats, of which two are used.
SEATS: Final = LockName("n:" + "5" * 32, 7, 2)
WEEK_MS: Final = 7 * 24 * 3600 * 1000


def nothing(world: World) -> None:
    """Prepare nothing."""


class Case(NamedTuple):
    """A command that is cut.

    Args:
        script: The name of its script.
        prepare: What happens before.
        act: Sends the command.
        facts: What the acquires of the world ask for.
        then: What happens before the command is repeated.
    """

    script: str
    prepare: Callable[[World], object]
    act: Callable[[World], object]
    facts: dict[str, object] = {}  # noqa: RUF012 (it is never changed)
    then: Callable[[World], object] = nothing


def steps(*each: Callable[[World], object]) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        for step in each:
            step(world)

    return prepare


def deliver(*task_ids: str, **facts: object) -> Callable[[World], None]:
    """Deliver messages. The first takes the lock if it is free."""
    return steps(*(partial(World.deliver, task_id=task_id, **facts) for task_id in task_ids))


def finish(task_id: str, **facts: object) -> Callable[[World], object]:
    return lambda world: world.finish(task_id, **facts)


def deliver_granted(world: World) -> None:
    """Deliver the message that was published for a grant."""
    world.deliver(*world.open.pop())


def finish_first(world: World) -> None:
    """End the body that runs, if there is one."""
    for task_id in list(world.running):
        world.finish(task_id)


def deliver_open(world: World) -> None:
    """Deliver what is not acknowledged. A copy of a message that has ended must not run."""
    due, world.open = world.open, []
    for task_id, grant_id in due:
        world.deliver(task_id, grant_id, redelivered=True)


def sweep(world: World) -> None:
    world.sweep()


def time_passes(world: World) -> None:
    world.time_passes()


def lose_grant(world: World) -> None:
    """The published message of a grant is lost, and its grant times out."""
    world.open.clear()
    world.time_passes()


def make_due(world: World) -> None:
    """Let the next sweep visit the name."""
    world.client.zadd(world.keys.queue()[3], {world.keys.name: 1})


def forget_grant(world: World) -> None:
    """The granter dies before it has published the message."""
    world.open.clear()
    for key in world.lock_keys():
        if world.client.hexists(key, "due"):
            world.client.hdel(key, "published")
            world.client.hset(key, "due", "1")
    make_due(world)


def mark_done(task_id: str) -> Callable[[World], None]:
    """A copy of the message has finished."""

    def mark(world: World) -> None:
        world.ended.add(task_id)
        world.client.set(world.keys.done(digest(task_id)), round(time.time() * 1e6 + 1e9), px=TTL)

    return mark


def lose(task_id: str) -> Callable[[World], None]:
    """Its process is paused, and its lease ends."""

    def pause(world: World) -> None:
        world.paused[task_id] = world.running.pop(task_id)
        world.ran.remove(task_id)
        world.time_passes()

    return pause


def redeliver(task_id: str) -> Callable[[World], None]:
    """The broker delivers its message again. It waits at its rank, and is the first to be granted the lock."""
    return deliver(task_id)


def finish_lost(task_id: str) -> Callable[[World], None]:
    """The paused process goes on, and ends its body."""

    def end(world: World) -> None:
        world.open = [(other, grant_id) for other, grant_id in world.open if other != task_id]
        world.ended.add(task_id)
        world.running[task_id] = world.paused.pop(task_id)
        world.finish(task_id)

    return end


def sweep_last_try(world: World) -> None:
    """End the grant, and make the message a dead letter. An operator deletes it later."""
    granted, _ = world.granted()
    world.ended.add(world.id_of(granted))
    world.pending.append(lambda: world.client.delete(world.keys.named("dead"), world.keys.named("dead_letters")))

    def last() -> None:
        world.publish(world.store.sweep(world.swept, world.granter(), TURN, 1).granted)

    world.do(last)


def crash(task_id: str) -> Callable[[World], None]:
    """Its process dies, and its lease ends. The broker delivers its message again, which ends it."""

    def die(world: World) -> None:
        del world.running[task_id]
        world.time_passes()

    return die


def revoke(task_id: str) -> Callable[[World], None]:
    """Take a waiter out of the queue, store its end, and delete its message."""

    def take_out(world: World) -> None:
        world.ended.add(task_id)
        world.open = [(other, grant_id) for other, grant_id in world.open if other != task_id]
        world.pending.append(lambda: world.remove(digest(task_id), ended=True))
        world.do(lambda: world.remove(digest(task_id)))

    return take_out


def make_dead_letter(world: World) -> None:
    """Make the granted message a dead letter. An operator deletes it later."""
    world.open.clear()
    granted, _ = world.granted()
    world.ended.add(world.id_of(granted))
    world.pending.append(lambda: world.client.delete(world.keys.named("dead"), world.keys.named("dead_letters")))
    world.do(lambda: world.remove(granted, dead_letter=True))


def decline(world: World) -> None:
    granted, grant_id = world.granted()
    world.store.decline_grant(world.name, Grant(granted, "", grant_id), foreign=True)


def confirm(world: World) -> None:
    world.store.confirm_publish(world.name, world.granted()[0], TURN)


def know(*task_ids: str) -> Callable[[World], None]:
    """Publish these calls in this order, whichever is delivered first."""
    return lambda world: world.known.extend(task_ids)


def evict_nothing(world: World) -> None:
    """The process that has to store the end of a replaced call dies."""
    world.evicts_nothing = True


def evict_again(world: World) -> None:
    world.evicts_nothing = False


def deliver_granted_last(world: World) -> None:
    """Deliver the message that was published for a grant before newer calls arrived."""
    world.deliver(*world.open.pop(0))


def set_aside(task_id: str) -> Callable[[World], None]:
    """Make a waiter a dead letter."""
    return lambda world: world.remove(digest(task_id), dead_letter=True)


def requeue(task_id: str) -> Callable[[World], None]:
    return lambda world: world.do(lambda: world.store.requeue(world.name, digest(task_id)))


def cancel_hold(world: World) -> None:
    holder = world.store.describe(world.name).holder
    assert holder is not None
    assert holder.hold
    world.store.cancel_hold(world.name, world.running["a"], holder.hold)


def hold(world: World) -> None:
    world.do(lambda: world.store.hold(world.name, "operator:ann@desk", TTL, "repair"))


def free(world: World) -> None:
    """Free the lock although its body runs. Its release finds it lost."""
    world.paused["a"] = held = world.running.pop("a")
    world.publish(world.store.free(world.name, held, force=True)[1])


CLAIM: Final = ClaimRequest("c", 0, TTL, True, Requester("app.post", "c", "node1", "77"), "attempt-1")
ONCE: Final = {"queue": False, "once": True}
PLAIN: Final = {"queue": False}
QUEUED_ONCE: Final = {"once": True}
DEBOUNCE: Final = {"debounce": Debounce(5000, 50_000)}
REPLACE: Final = {"replace": Replace(20_000)}


def claim(world: World) -> None:
    """Claim a name. Another publisher, which is refused it later, finds a claim that ends."""
    other = CLAIM._replace(task_id="d", attempt="attempt-2")
    world.pending.append(lambda: world.store.claim([(world.name, other)]))
    world.store.claim([(world.name, CLAIM)])


def pass_on_wake(world: World) -> None:
    world.pending.append(world.store.release_listener(world.name).pass_on)
    world.store.release_listener(world.name).pass_on()


def save_worker_record(world: World) -> None:
    """Save a crash record. The worker saves it again at its next change."""
    world.do(lambda: world.store.save_worker_record("node1", "w", "{}", TTL))


def forget_mark(world: World) -> None:
    world.client.delete(world.keys.run())


def list_runs(world: World) -> None:
    world.do(lambda: list(world.store.unsettled_runs()))


def forget_dead_letter(world: World) -> None:
    """Delete a dead letter, but not from the index."""
    world.client.zadd(world.keys.named("dead_letters"), {f"{digest('a')} {world.keys.name}": 1})


def list_dead_letters(world: World) -> None:
    world.do(lambda: list(world.store.dead_letters()))


def make_immortal(world: World) -> None:
    world.client.persist(world.keys.lock)


def start_quarantine(world: World) -> None:
    store = store_of(world)
    quarantine = world.keys.named("quarantine")
    store._run_safe(command("start_quarantine", None, quarantine=quarantine, quarantine_ms=1000, failover_epoch=0))


LOCKS: Final = {
    "acquire": Case("acquire", nothing, deliver("a"), PLAIN),
    "acquire-with-min-hold": Case("acquire", nothing, deliver("a", min_hold_ms=1000), PLAIN),
    "acquire-once": Case("acquire", nothing, deliver("a"), ONCE),
    "acquire-after-a-crash": Case("acquire", steps(deliver("a"), crash("a")), deliver("b"), ONCE),
    "acquire-held": Case("acquire", deliver("a"), deliver("b", notify=True), PLAIN),
    "acquire-reserved": Case(
        "acquire", steps(deliver("a"), finish("a", reserved_for=digest("b"), reserved_ms=TTL)), deliver("b"), PLAIN
    ),
    "renew": Case(
        "renew",
        deliver("a"),
        lambda world: world.store.renew([Renewal(world.name, world.running["a"], 2 * TTL, (("dup", "1"),))]),
        PLAIN,
    ),
    "release": Case("release", deliver("a"), finish("a"), PLAIN),
    "release-with-a-duplicate": Case(
        "release", steps(deliver("a"), deliver("a", redelivered=True)), finish("a"), PLAIN, then=deliver_open
    ),
    "release-waited-for": Case("release", steps(deliver("a"), deliver("b", notify=True)), finish("a"), PLAIN),
    "release-with-min-hold": Case("release", deliver("a", min_hold_ms=60_000), finish("a"), PLAIN),
    "release-for-a-retry": Case("release", deliver("a"), finish("a", reserved_for=digest("b"), reserved_ms=TTL), PLAIN),
    "release-used": Case("release", deliver("a"), finish("a", once=True, used_ms=TTL, requester="{}"), ONCE),
    "release-failed": Case("release", deliver("a"), finish("a", once=True, window_ms=TTL), ONCE),
    "release-after-a-crash": Case(
        "release", steps(deliver("a"), crash("a"), deliver("b")), finish("b", once=True, window_ms=WEEK_MS), ONCE
    ),
    "release-rolled-back": Case("release", deliver("a"), finish("a", outcome_unknown=True, rolled_back=True), PLAIN),
}
QUEUES: Final = {
    "take": Case("acquire_queued", nothing, deliver("a")),
    "take-once": Case("acquire_queued", nothing, deliver("a"), {"once": True}),
    "park": Case("acquire_queued", deliver("a"), deliver("b")),
    "park-again": Case("acquire_queued", deliver("a", "b"), deliver("b")),
    "park-in-a-full-queue": Case("acquire_queued", deliver("a", "b"), deliver("c", limit=1, evict_oldest=True)),
    "park-on-a-free-lock": Case("acquire_queued", steps(deliver("a", "b"), crash("a")), deliver("c")),
    "take-a-grant": Case("acquire_queued", steps(deliver("a", "b", "c"), finish("a")), deliver_granted),
    "take-the-last-grant": Case("acquire_queued", steps(deliver("a", "b"), finish("a")), deliver_granted),
    "end-a-grant-of-a-finished-message": Case(
        "acquire_queued", steps(deliver("a", "b", "c"), finish("a"), mark_done("b")), deliver_granted
    ),
    "release": Case("release_queued", deliver("a"), finish("a")),
    "release-with-a-duplicate": Case(
        "release_queued", steps(deliver("a"), deliver("a", redelivered=True)), finish("a"), then=deliver_open
    ),
    "release-with-waiters": Case("release_queued", deliver("a", "b", "c"), finish("a")),
    "release-with-min-hold": Case("release_queued", steps(deliver("a", min_hold_ms=TTL), deliver("b")), finish("a")),
    "release-for-a-retry": Case(
        "release_queued", deliver("a", "b"), finish("a", reserved_for=digest("c"), reserved_ms=TTL)
    ),
    "release-for-a-queued-retry": Case(
        "release_queued", deliver("a", "b", "c"), finish("a", reserved_for=digest("c"), reserved_ms=TTL)
    ),
    "release-after-a-loss": Case(
        "release_queued", steps(deliver("a", "b"), lose("a"), redeliver("a"), sweep), finish_lost("a")
    ),
    "release-of-another-policy": Case("release", deliver("a", "b"), finish("a", queue=False)),
    "sweep-a-free-lock": Case("sweep", steps(deliver("a", "b", "c"), crash("a")), sweep),
    "sweep-a-held-lock": Case("sweep", steps(deliver("a", "b"), make_due), sweep),
    "sweep-an-unpublished-grant": Case("sweep", steps(deliver("a", "b"), crash("a"), sweep, forget_grant), sweep),
    "sweep-a-lost-grant": Case("sweep", steps(deliver("a", "b", "c"), finish("a"), lose_grant), sweep),
    "sweep-the-only-lost-grant": Case("sweep", steps(deliver("a", "b"), finish("a"), lose_grant), sweep),
    "sweep-a-dead-letter": Case("sweep", steps(deliver("a", "b", "c"), finish("a"), lose_grant), sweep_last_try),
    "confirm": Case("confirm_publish", steps(deliver("a", "b"), finish("a")), confirm),
    "decline": Case("decline_grant", steps(deliver("a", "b"), crash("a"), sweep, forget_grant), decline),
    "revoke-a-waiter": Case("remove_waiter", deliver("a", "b", "c"), revoke("b")),
    "revoke-a-granted-call": Case("remove_waiter", steps(deliver("a", "b", "c"), finish("a")), revoke("b")),
    "revoke-the-last-call": Case("remove_waiter", steps(deliver("a", "b"), finish("a")), revoke("b")),
    "make-a-dead-letter": Case("remove_waiter", steps(deliver("a", "b", "c"), finish("a")), make_dead_letter),
}
OPERATORS: Final = {
    "hold-a-free-lock": Case("hold_lock", nothing, hold),
    "hold-a-granted-lock": Case("hold_lock", steps(deliver("a", "b"), finish("a")), hold),
    "hold-a-held-lock": Case("hold_lock", deliver("a", "b"), hold),
    "hold-from-the-release": Case("release_queued", steps(deliver("a", "b"), hold), finish("a")),
    "cancel-a-hold": Case("cancel_hold", steps(deliver("a", "b"), hold), cancel_hold),
    "free": Case("free_lock", deliver("a", "b"), free),
    "requeue": Case("requeue", steps(deliver("a", "b", "c"), set_aside("b")), requeue("b")),
}
REPLACED: Final = {
    "debounce": Case("acquire_queued", nothing, deliver("a"), DEBOUNCE),
    "debounce-again": Case("acquire_queued", deliver("a"), deliver("b"), DEBOUNCE),
    "debounce-an-older-call": Case("acquire_queued", steps(know("a"), deliver("b")), deliver("a"), DEBOUNCE),
    "debounce-behind-a-run": Case(
        "acquire_queued", steps(deliver("a"), time_passes, sweep, deliver_granted), deliver("b"), DEBOUNCE
    ),
    "start-debounced": Case("acquire_queued", steps(deliver("a"), time_passes, sweep), deliver_granted, DEBOUNCE),
    "give-way-to-a-debounced": Case(
        "acquire_queued",
        steps(evict_nothing, deliver("a", "b"), time_passes, sweep, evict_again),
        deliver_granted,
        DEBOUNCE,
    ),
    "start-replacing": Case("acquire_queued", nothing, deliver("a"), REPLACE),
    "replace": Case("acquire_queued", deliver("a"), deliver("b"), REPLACE),
    "replace-a-waiter": Case("acquire_queued", deliver("a", "b"), deliver("c"), REPLACE),
    "replaced-by-a-waiter": Case("acquire_queued", steps(know("a", "b"), deliver("a", "c")), deliver("b"), REPLACE),
    "give-way-to-a-replacing": Case(
        "acquire_queued", steps(deliver("a", "b"), finish("a"), deliver("c")), deliver_granted_last, REPLACE
    ),
    "release-replaced": Case("release_queued", deliver("a", "b"), finish("a"), REPLACE),
}


def store_of(world: World) -> RedisOperatorStore:
    assert isinstance(world.store, RedisOperatorStore)
    return world.store


OTHERS: Final = {
    "claim": Case("claim", nothing, claim),
    "claim-again": Case("claim", claim, lambda world: world.store.claim([(world.name, CLAIM._replace(generation=1))])),
    "extend-a-claim": Case(
        "extend_claim", claim, lambda world: world.store.extend_claims([ClaimExtension(world.name, "c", 2 * TTL)])
    ),
    "release-a-claim": Case(
        "release_claim", claim, lambda world: world.store.release_claim(world.name, "c", 0, "attempt-1")
    ),
    "mark-done": Case("mark_done", nothing, lambda world: world.store.mark_done(world.name, digest("a"), "a", 0)),
    "forget-a-run": Case("forget_run", steps(deliver("a"), crash("a")), lambda w: w.store.forget_run(w.name), ONCE),
    "resolve-a-run": Case(
        "resolve_run",
        steps(deliver("a"), crash("a")),
        lambda world: world.store.resolve_run(world.name, sent=False, window_ms=TTL),
        ONCE,
    ),
    "adopt-a-token": Case(
        "adopt_token",
        deliver("a"),
        lambda world: store_of(world).adopt_token(world.name, world.running["a"], 2**52, "seed", waited=True),
        ONCE,
    ),
    "pass-on-a-wake": Case("pass_on_wake", nothing, pass_on_wake),
    "save-a-worker-record": Case("save_worker_record", nothing, save_worker_record),
    "lease-a-sweep": Case("sweep_lease", nothing, lambda world: world.store.sweep_lease("b", "sweep", "w", 1000)),
    "list-settled-runs": Case("check_run", steps(deliver("a"), crash("a"), forget_mark), list_runs, ONCE),
    "list-dead-letters": Case("check_dead_letter", forget_dead_letter, list_dead_letters),
    "inspect": Case("inspect", steps(deliver("a"), make_immortal), lambda world: world.store.inspect(world.name)),
    "save-an-audit": Case("save_audit", nothing, lambda world: world.store.save_audit(1.0, "{}")),
    "start-a-quarantine": Case("start_quarantine", nothing, start_quarantine),
}


@pytest.fixture
def store(clean_server: Server) -> Iterator[RedisOperatorStore]:
    made = open_operator_store((StoreLocation.of(clean_server.url()),), timeout=5, prefix="dlock")
    assert isinstance(made, RedisOperatorStore)
    with closing(made):
        yield made


def for_each_write(
    store: RedisOperatorStore,
    client: redis.Redis,
    cutter: Cutter,
    name: LockName,
    prepare: Callable[[World], object],
    act: Callable[[World, int], object],
    facts: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Cut a script at its first write in a new world, then at its second one, and so on until it ends."""
    for at in range(1, MOST_WRITES):
        client.flushall()
        world = World(store, client, name, **facts)
        if name.seats != 1:
            world.deliver("y")  # on the other seat
        prepare(world)
        try:
            act(world, at)
        except AssertionError as error:
            raise AssertionError(f"cut at write {at}: {error}") from error
        if not cutter.happened:
            assert at > 1, "the script writes nothing"
            return
    raise AssertionError("the script does not end")


def cut_everywhere(store: RedisOperatorStore, client: redis.Redis, cutter: Cutter, case: Case, name: LockName) -> None:
    def act(world: World, at: int) -> None:
        with cutter.cut(case.script, at):
            case.act(world)
        world.check_places()
        case.then(world)
        world.go_on()

    for_each_write(store, client, cutter, name, case.prepare, act, case.facts)


ON_ONE_LOCK: Final = {**QUEUES, **OPERATORS, **REPLACED, **OTHERS}


@pytest.fixture
def cutter(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Cutter:
    return Cutter(client, monkeypatch)


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"lock-{name}") for name, case in LOCKS.items()]
    + [pytest.param(case, id=name) for name, case in ON_ONE_LOCK.items()],
)
def test_script_that_stops_at_any_write_is_repaired(
    store: RedisOperatorStore, client: redis.Redis, cutter: Cutter, case: Case
) -> None:
    cut_everywhere(store, client, cutter, case, NAME)


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in QUEUES.items() if case.script in SEAT_SCRIPTS]
)
def test_script_on_a_seat_that_stops_at_any_write_is_repaired(
    store: RedisOperatorStore, client: redis.Redis, cutter: Cutter, case: Case
) -> None:
    cut_everywhere(store, client, cutter, case, SEATS)


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
@pytest.mark.parametrize("command", ["hset", "hdel", "set", "del", "pexpire", "rpush", "zadd", "zrem"])
@pytest.mark.parametrize("facts", [{}, DEBOUNCE, REPLACE, PLAIN], ids=["queue", "debounce", "replace", "plain"])
def test_right_that_is_missing_for_a_moment_stops_no_call(
    clean_server: Server, client: redis.Redis, command: str, facts: dict[str, object]
) -> None:
    """The same with a real refusal: each step runs without the right once, and with it afterwards."""
    client.execute_command("ACL", "SETUSER", "poor", *LOCK_RIGHTS)
    location = StoreLocation.of(f"redis://poor:{LOCK_PASSWORD}@{HOST}:{clean_server.port}/0")
    with closing(open_operator_store((location,), timeout=5, prefix="dlock")) as poor:
        world = World(poor, client, **facts)
        world.deliver("a")
        for step in (deliver("b"), deliver("c"), finish_first, sweep, deliver("d"), time_passes, sweep):
            client.execute_command("ACL", "SETUSER", "poor", f"-{command}")
            with suppress(StoreRefused):
                step(world)
            client.execute_command("ACL", "SETUSER", "poor", f"+{command}")
        world.go_on()
    client.execute_command("ACL", "DELUSER", "poor")


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
@pytest.mark.parametrize("name", [NAME, SEATS], ids=["lock", "seats"])
def test_waiters_whose_places_were_deleted_are_granted_all_the_same(
    store: RedisOperatorStore, client: redis.Redis, name: LockName
) -> None:
    """As the error message advises if another program overwrote the sorted set."""
    world = World(store, client, name)
    for number in range(20):
        world.deliver(f"t{number}")
    waiting, _, delayed, _ = world.keys.queue()
    assert client.delete(waiting, delayed)
    world.go_on(30)
    assert sorted(world.ran) == sorted(world.known)


@pytest.mark.invariant("stores-agree")
@pytest.mark.parametrize("limit", [0, 2, 1], ids=["sweeper", "same limit", "no limit"])
def test_sweep_gives_no_second_place_to_a_waiter_that_is_granted_a_seat(
    store: RedisOperatorStore, client: redis.Redis, limit: int
) -> None:
    """Also a sweep that does not know of the seats: a task without ``limit`` has the same name."""
    world = World(store, client, SEATS)
    steps(deliver("y", "a", "b"), finish("a"))(world)
    assert store.sweep(SEATS._replace(seats=limit), "g.1", TURN, 5).granted is None
    assert world.granted()[0] == digest("b")
    assert client.zcard(world.keys.queue()[0]) == 0


@pytest.mark.parametrize("facts", [PLAIN, {}], ids=["plain", "queue"])
def test_release_that_sets_a_mark_works_while_memory_is_full(
    store: RedisOperatorStore, client: redis.Redis, facts: dict[str, object]
) -> None:
    """It sets the mark before it frees the lock, and a full server would refuse that as the first write."""
    world = World(store, client, **facts)
    steps(deliver("a"), deliver("a", redelivered=True))(world)
    client.config_set("maxmemory", "1")
    try:
        world.finish("a")
    finally:
        client.config_set("maxmemory", "0")
    world.go_on()


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
@pytest.mark.parametrize("name", [NAME, SEATS], ids=["lock", "seats"])
def test_sweep_that_stops_at_any_write_counts_a_lost_grant_once(
    store: RedisOperatorStore, client: redis.Redis, cutter: Cutter, name: LockName
) -> None:
    """The next sweep does the same again. Two counts of one lost grant would make a dead letter too early."""

    def sweep_twice(world: World, at: int) -> None:
        with cutter.cut("sweep", at):
            world.sweep()
        make_due(world)
        assert world.store.sweep(world.swept, world.granter(), TURN, 2).dead_letter == ""

    prepare = steps(deliver("a", "b", "c"), finish("a"), lose_grant)
    for_each_write(store, client, cutter, name, prepare, sweep_twice)


@pytest.mark.invariant("cut-scripts-leave-nothing-for-ever")
@pytest.mark.parametrize("granted", [False, True], ids=["waiting", "granted"])
@pytest.mark.parametrize("name", [NAME, SEATS], ids=["lock", "seats"])
def test_removal_that_stops_at_any_write_loses_no_call_whose_worker_dies_as_well(
    store: RedisOperatorStore, client: redis.Redis, cutter: Cutter, name: LockName, granted: bool
) -> None:
    """The result of the call is not stored yet. So its message waits, or is a dead letter, or both."""

    def remove(world: World, at: int) -> None:
        with cutter.cut("remove_waiter", at):
            world.remove(digest("b"))
        if digest("b") not in client.hkeys(world.keys.named("dead")):
            assert not client.exists(world.keys.done(digest("b"))), "its done mark ends each copy of it"
            world.go_on()
            assert "b" in world.ran

    prepare = steps(deliver("a", "b", "c"), finish("a") if granted else nothing)
    for_each_write(store, client, cutter, name, prepare, remove)


def test_every_script_that_writes_is_cut() -> None:
    writing = {
        name
        for name, script in SCRIPTS.items()
        if set(map(str.lower, re.findall(r"call\('(\w+)'", script.body))) - set(READS)
    }
    assert writing == {case.script for case in (*LOCKS.values(), *ON_ONE_LOCK.values())}
