"""The rights that locks need: documented, sufficient, and none too many."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from celery import Celery

from celery_dlock import Lock
from celery_dlock.errors import StoreRefused
from celery_dlock.keys.key_spec import LockName
from celery_dlock.locking.waiting import POLL
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, AcquireRequest, Grant, Identity, Parked, QueueRequest, Renewal, Requester
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.scripts import SCRIPTS
from celery_dlock.store.redis.store import RedisStore
from tests.support.processes import HOST, ROOT
from tests.support.scripts import all_variants
from tests.support.servers import (
    CLUSTER_COMMANDS,
    LOCK_COMMANDS,
    LOCK_RIGHTS,
    LOCK_USER,
    OPERATOR_RIGHTS,
    OPERATOR_USER,
    Server,
    cluster_rights,
)
from tests.support.stores import store_at
from tests.support.topologies import ClusterSet

#: Rights without which the nodes of a Cluster are recognised less well.
NOT_NEEDED = ("cluster|myid", "cluster|nodes")
REMEDY = "grant what docs/reference/redis-keys-and-permissions.md lists under Permissions"
#: Sent as they are; all others are called by scripts.
BARE = {"evalsha", "eval", "blpop", "info", "select", "hgetall"}
#: Without these, a release wakes no waiting call. Locks work all the same.
FOR_WAKING = ("blpop", "rpush")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("acl") / "server") as made:
        yield made


class Round:
    """Everything that a store does, each step on its own, so that one that is refused hides no other."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store
        self.errors: list[str] = []
        for step in (self.lock, self.take_back, self.wait, self.keep, self.queue, self.sweep, self.look):
            step()

    def do(self, verb: Callable[..., object], *args: object, **options: object) -> object:
        try:
            return verb(*args, **options)
        except StoreRefused as error:
            self.errors.append(str(error))
            return None

    def name(self, text: str) -> LockName:
        return LockName(f"n:{text}", 7)

    def request_for(self, task_id: str, **facts: object) -> AcquireRequest:
        return AcquireRequest(Requester("app.post", task_id, "node1", "77"), Identity(task_id), **facts)  # type: ignore[arg-type]

    def lock(self) -> None:
        name, store = self.name("lock"), self.store
        for _ in range(2):
            self.do(store.acquire, name, "a.1", 60_000, self.request_for("a", once=True))
        self.do(store.renew, [Renewal(name, "a.1", 90_000, (("dup", "1"),))])
        self.do(store.inspect, name)
        self.do(store.release, name, "a.1", ReleaseRequest(True, Identity("a").digest, 60_000, "[]"))

    def take_back(self) -> None:
        self.do(self.store.release, self.name("back"), "b.1", ReleaseRequest(outcome_unknown=True))

    def wait(self) -> None:
        name, store = self.name("wait"), self.store
        self.do(store.acquire, name, "c.1", 60_000, self.request_for("c"))

        self.do(store.acquire, name, "d.1", 60_000, self.request_for("d", notify=True))
        self.do(store.release, name, "c.1", ReleaseRequest())
        self.do(store.release_listener(name).wait, 0.05)
        self.do(store.release_listener(name).pass_on)

    def keep(self) -> None:
        name = self.name("keep")
        self.do(self.store.acquire, name, "e.1", 60_000, self.request_for("e", min_hold_ms=60_000))
        self.do(self.store.release, name, "e.1", ReleaseRequest())

    def park(self, name: LockName, task_id: str, **place: object) -> object:
        entry = f'["app.post", "{task_id}"]\n{{}}'
        request = self.request_for(task_id, queue=QueueRequest(entry, **place))  # type: ignore[arg-type]
        return self.do(self.store.acquire, name, f"{task_id}.1", 60_000, request)

    def queue(self) -> None:
        name, store = self.name("queue"), self.store
        self.do(store.acquire, name, "f.1", 60_000, self.request_for("f", queue=QueueRequest()))
        for task_id in ("g", "h", "g"):
            self.park(name, task_id, limit=2, evict_oldest=True)
        self.do(store.list_waiters, name, 10)
        self.do(store.release, name, "f.1", ReleaseRequest(True, Identity("f").digest, queue=True))
        self.do(store.remove_waiter, name, Identity("h").digest, "s", ended=True)

    def sweep(self) -> None:
        name, store = self.name("sweep"), self.store
        self.do(store.acquire, name, "i.1", 60_000, self.request_for("i", queue=QueueRequest()))
        self.park(name, "j")
        self.do(store.sweep, name, "s", 60_000, 5)
        self.do(store.release, name, "i.1", ReleaseRequest(True, Identity("i").digest, queue=True))
        self.do(store.confirm_publish, name, Identity("j").digest, 1)
        time.sleep(0.005)  # its grant passes
        self.do(store.sweep, name, "s", 60_000, 5)
        self.do(store.list_due_queues, [7], 10)
        for foreign in (True, False):
            self.do(store.decline_grant, name, Grant(Identity("j").digest, "", "1"), foreign=foreign)
        for worker in "vw":
            self.do(store.sweep_lease, "amqp://h:5672//", "sweep", worker, 1000)

    def look(self) -> None:
        self.do(self.store.info)
        self.do(self.store.save_worker_record, "node", "worker", "{}", 1000)
        self.do(self.store.worker_records, "node")
        self.do(self.store.save_worker_record, "node", "worker", "", 0)


@pytest.fixture
def admin(own: Server) -> Iterator[redis.Redis]:
    own.flush()
    with own.client() as connected:
        connected.script_flush()
        connected.acl_log_reset()
        yield connected


def go_round(own: Server, user: str = LOCK_USER) -> list[str]:
    # Not database 0, so that to select another is among what is done.
    store = store_at(f"redis://{user}:secret@{HOST}:{own.port}/2", timeout=5)
    try:
        return Round(store).errors
    finally:
        store.close()


def test_the_documented_rights_are_those_of_the_tests() -> None:
    text = (ROOT / "docs/reference/redis-keys-and-permissions.md").read_text()
    found = re.search(r"ACL SETUSER (\w+) (.*?)```", text, re.DOTALL)
    assert found is not None
    assert (found[1], set(found[2].split())) == (LOCK_USER, set(LOCK_RIGHTS))


def test_the_documented_rights_of_an_operator_are_those_of_the_tests() -> None:
    text = (ROOT / "docs/reference/redis-keys-and-permissions.md").read_text()
    found = re.search(rf"ACL SETUSER {OPERATOR_USER} (.*?)```", text, re.DOTALL)
    assert found is not None
    assert set(found[1].split()) == set(OPERATOR_RIGHTS)


def test_documented_commands_are_those_that_scripts_call_or_clients_send() -> None:
    sources = b"".join(variant.source for script in SCRIPTS.values() for variant in all_variants(script))
    called = {name.decode().lower() for name in re.findall(rb"redis\.p?call\('(\w+)'", sources)}
    assert set(LOCK_COMMANDS) == (called | BARE) - set(CLUSTER_COMMANDS)


@pytest.mark.invariant("store-errors-name-the-remedy", "documented-permissions-suffice")
def test_with_the_documented_rights_everything_works_and_nothing_is_denied(own: Server, admin: redis.Redis) -> None:
    assert go_round(own) == []
    assert admin.acl_log() == []


@pytest.mark.invariant("store-errors-name-the-remedy", "documented-permissions-suffice")
@pytest.mark.parametrize("command", [command for command in LOCK_COMMANDS if command not in FOR_WAKING])
def test_without_one_of_them_something_fails_and_says_which(own: Server, admin: redis.Redis, command: str) -> None:
    """So none is granted that is not needed."""
    admin.execute_command("ACL", "SETUSER", "poor", *LOCK_RIGHTS, f"-{command}")  # type: ignore[no-untyped-call]
    errors = go_round(own, "poor")
    assert errors
    for error in errors:
        assert f"no permissions to run the '{command}' command" in error
        assert REMEDY in error


@pytest.mark.invariant("store-errors-name-the-remedy", "documented-permissions-suffice")
@pytest.mark.parametrize("command", FOR_WAKING)
def test_without_a_right_for_waking_nothing_fails_and_one_warning_says_which(
    own: Server, admin: redis.Redis, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As for a user that was created before these commands were needed."""
    admin.execute_command("ACL", "SETUSER", "poor", *LOCK_RIGHTS, f"-{command}")  # type: ignore[no-untyped-call]
    assert go_round(own, "poor") == []
    text = f"a right is missing: {command.upper()}; a release wakes no waiting call, which asks every 2 s instead"
    expected = f"lock store: {text}; action required: {REMEDY}"
    assert [record.message for record in caplog.records if "a right is missing" in record.message] == [expected]


@pytest.mark.parametrize("command", FOR_WAKING)
def test_waiting_call_without_a_right_for_waking_gets_the_lock_by_its_poll(
    own: Server, admin: redis.Redis, command: str
) -> None:
    admin.execute_command("ACL", "SETUSER", "poor", *LOCK_RIGHTS, f"-{command}")  # type: ignore[no-untyped-call]
    app = Celery("poor", broker="memory://", set_as_current=False)
    app.conf.dlock_url = f"redis://poor:secret@{HOST}:{own.port}/2"
    held = Lock("poor", app=app)
    assert held.acquire()

    def wait() -> bool:
        waiting = Lock("poor", app=app)
        acquired = waiting.acquire(timeout=20)
        waiting.release()
        return acquired

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(wait)
        time.sleep(0.1)
        held.release()
        began = time.monotonic()
        assert waiting.result()
    assert time.monotonic() - began < POLL + 1


def test_without_its_keys_something_fails_and_says_so(own: Server, admin: redis.Redis) -> None:
    rights = [right for right in LOCK_RIGHTS if right != "~dlock:*"]
    admin.execute_command("ACL", "SETUSER", "poor", "reset", *rights)  # type: ignore[no-untyped-call]
    errors = go_round(own, "poor")
    assert errors
    assert all("to access a key" in text for text in errors), errors
    assert all(REMEDY in text for text in errors), errors


def test_a_parked_message_is_parked_in_that_round(own: Server, admin: redis.Redis) -> None:
    """Else a step of it proves nothing."""
    assert admin.ping()
    store = store_at(own.lock_url(), timeout=5)
    round_ = Round(store)
    name = round_.name("proof")
    assert isinstance(store.acquire(name, "k.1", 60_000, round_.request_for("k", queue=QueueRequest())), Acquired)
    assert isinstance(round_.park(name, "l"), Parked)
    store.close()


# On a Cluster


def test_the_documented_rights_for_a_cluster_are_those_of_the_tests() -> None:
    text = (ROOT / "docs/reference/redis-keys-and-permissions.md").read_text()
    table = text.partition("On a Redis Cluster, on every node")[2].partition("## ")[0]
    assert set(re.findall(r"`\+(.*?)`", table.replace("\\|", "|"))) == set(CLUSTER_COMMANDS)


def go_round_a_cluster(cluster: ClusterSet, user: str) -> list[str]:
    """A round, and one look at a lock whose slot is on its way."""
    places = ",".join(f"{HOST}:{node.port}" for node in cluster.nodes)
    store = store_at(f"redis+cluster://{user}:secret@{places}", timeout=5)
    try:
        round_ = Round(store)
        name = round_.name("moving")
        round_.do(store.acquire, name, "m.1", 60_000, round_.request_for("m"))
        slot = cluster.slot_of(LockKeys.of("dlock", name).lock)
        source = cluster.node_of(slot)
        to = next(node for node in cluster.primaries() if node is not source)
        cluster.begin_move(slot, to)
        cluster.move_keys(slot)
        round_.do(store.inspect, name)
        cluster.end_move(slot)
        cluster.move_slot(slot, source)
        return round_.errors
    finally:
        store.close()


class TestCluster:
    @pytest.fixture
    def nodes(self, cluster_set: ClusterSet) -> Iterator[Callable[..., None]]:
        """Tells all nodes something of users."""

        def tell(*words: str) -> None:
            for node in cluster_set.nodes:
                with node.client() as client:
                    client.execute_command("ACL", *words)  # type: ignore[no-untyped-call]

        cluster_set.flush()
        tell("LOG", "RESET")
        yield tell
        tell("DELUSER", "poor")

    def test_with_the_documented_rights_nothing_is_denied(
        self, cluster_set: ClusterSet, nodes: Callable[..., None]
    ) -> None:
        assert go_round_a_cluster(cluster_set, LOCK_USER) == []
        for node in cluster_set.nodes:
            with node.client() as client:
                assert client.acl_log() == []

    def test_without_the_right_to_ask_who_answers_nothing_is_denied(
        self, cluster_set: ClusterSet, nodes: Callable[..., None]
    ) -> None:
        nodes("SETUSER", "poor", *LOCK_RIGHTS, *cluster_rights(), *(f"-{command}" for command in NOT_NEEDED))
        assert go_round_a_cluster(cluster_set, "poor") == []

    @pytest.mark.parametrize("command", [command for command in CLUSTER_COMMANDS if command not in NOT_NEEDED])
    def test_without_one_of_them_something_fails_and_says_which(
        self, cluster_set: ClusterSet, nodes: Callable[..., None], command: str
    ) -> None:
        nodes("SETUSER", "poor", *LOCK_RIGHTS, *cluster_rights(), f"-{command}")
        errors = go_round_a_cluster(cluster_set, "poor")
        assert errors
        for error in errors:
            assert f"no permissions to run the '{command}' command" in error
            assert REMEDY in error
