"""The lock store answers, and does not do what it is asked: each cause has its class and its words, and passes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis
from celery import Celery

from celery_dlock import Lock
from celery_dlock.errors import ScriptStopped, StoreNotReady, StoreRefused, StoreUnavailable
from celery_dlock.store.model import Renewal
from tests.contract.helpers import TTL, keys_of, request_of
from tests.support.polling import eventually
from tests.support.processes import HOST
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server
from tests.support.stores import name_in, store_at

MB = 1024 * 1024


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--busy-reply-threshold", "50", "--key-load-delay", "300"]
    with Server(tmp_path_factory.mktemp("store-errors") / "server", persistent=True, options=options) as made:
        yield made


@pytest.fixture
def admin(own: Server) -> Iterator[redis.Redis]:
    own.flush()
    with own.client() as connected:
        yield connected


def lock_at(url: str) -> Lock:
    app = Celery("errors", broker="memory://", set_as_current=False)
    app.conf.update(dlock_url=url)
    return Lock("x", app=app)


def failure(lock: Lock) -> StoreUnavailable:
    with pytest.raises(StoreUnavailable) as raised:
        lock.acquire(blocking=False)
    return raised.value


# Faults of a server, each for as long as the block lasts


@contextmanager
def replica(admin: redis.Redis) -> Iterator[None]:
    admin.replicaof(HOST, "1")  # type: ignore[no-untyped-call]
    yield
    admin.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]


@contextmanager
def no_replicas_in_reach(admin: redis.Redis) -> Iterator[None]:
    admin.config_set("min-replicas-to-write", 1)
    yield
    admin.config_set("min-replicas-to-write", 0)


@contextmanager
def memory_full(admin: redis.Redis) -> Iterator[None]:
    admin.config_set("maxmemory-policy", "noeviction")
    admin.config_set("maxmemory", 1)
    yield
    admin.config_set("maxmemory", 0)


@contextmanager
def disk_full(admin: redis.Redis) -> Iterator[None]:
    folder = admin.config_get("dir")["dir"]
    admin.config_set("save", "3600 1000000")
    with _in_the_way(Path(folder) / "dump.rdb"):
        admin.bgsave()
        eventually(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", within=10)
        yield
    admin.bgsave()
    eventually(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "ok", within=10)
    admin.config_set("save", "")


@contextmanager
def _in_the_way(path: Path) -> Iterator[None]:
    """A folder where the server would write a file: also root's cannot."""
    path.mkdir()
    yield
    path.rmdir()


def _says_busy(admin: redis.Redis) -> bool:
    try:
        admin.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY") or "busy" in str(error)
    return False


@contextmanager
def busy(admin: redis.Redis) -> Iterator[None]:
    def spin() -> None:
        with admin_of(admin) as other, pytest.raises(redis.ResponseError, match=r"[Kk]illed"):
            other.eval("while true do end", 0)

    spinning = threading.Thread(target=spin)
    spinning.start()
    eventually(lambda: _says_busy(admin), message="it is not busy")
    yield
    admin.script_kill()
    spinning.join(10)


@contextmanager
def admin_of(client: redis.Redis) -> Iterator[redis.Redis]:
    settings = client.connection_pool.connection_kwargs
    with redis.Redis(host=settings["host"], port=settings["port"], decode_responses=True) as other:
        yield other


@contextmanager
def right_taken(admin: redis.Redis) -> Iterator[None]:
    admin.execute_command("ACL", "SETUSER", LOCK_USER, "-hset")  # type: ignore[no-untyped-call]
    yield
    admin.execute_command("ACL", "SETUSER", LOCK_USER, "+hset")  # type: ignore[no-untyped-call]


@contextmanager
def password_changed(admin: redis.Redis) -> Iterator[None]:
    admin.execute_command("ACL", "SETUSER", LOCK_USER, "resetpass", ">other")  # type: ignore[no-untyped-call]
    admin.client_kill_filter(_type="normal", skipme=True)
    yield
    admin.execute_command("ACL", "SETUSER", LOCK_USER, "resetpass", f">{LOCK_PASSWORD}")  # type: ignore[no-untyped-call]


@contextmanager
def overwritten(admin: redis.Redis) -> Iterator[None]:
    keys = admin.keys("dlock:*:lock:*")
    assert not keys
    lock = lock_at(f"redis://{HOST}:{admin.connection_pool.connection_kwargs['port']}/0")
    assert lock.acquire()
    (key,) = admin.keys("dlock:*:lock:*")
    lock.release()
    admin.set(key, "foreign")
    yield
    admin.delete(key)


FAULTS = [
    (replica, StoreNotReady, "it is a replica, and takes no writes until it is promoted", "READONLY"),
    (no_replicas_in_reach, StoreNotReady, "too few replicas are in reach (min-replicas-to-write)", "NOREPLICAS"),
    (busy, StoreNotReady, "it is busy with another program's script (SCRIPT KILL ends that)", "BUSY"),
    (memory_full, StoreRefused, "it has no memory left for locks: raise its maxmemory or make room", "OOM"),
    (disk_full, StoreRefused, "it cannot write to its disk, and so takes no writes: see its log", "MISCONF"),
    (
        right_taken,
        ScriptStopped,
        "grant what docs/reference/redis-keys-and-permissions.md lists under Permissions",
        "the 'hset' command",
    ),
    (password_changed, StoreRefused, "user or password is wrong: correct dlock_url", "invalid username-password"),
    (overwritten, ScriptStopped, "another program overwrote a key of a lock", "WRONGTYPE"),
]


@pytest.mark.invariant("store-errors-name-the-remedy", "refusing-store-is-unavailable")
@pytest.mark.parametrize(("fault", "kind", "told", "said"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_refusal_has_its_class_and_remedy_and_locks_are_taken_when_it_is_over(
    own: Server,
    admin: redis.Redis,
    fault: Callable[[redis.Redis], "contextmanager[None]"],
    kind: type[StoreUnavailable],
    told: str,
    said: str,
) -> None:
    lock = lock_at(own.lock_url())
    with fault(admin):  # type: ignore[attr-defined]  # it is a context manager
        error = failure(lock)
        assert type(error) is kind
        text = str(error)
        assert text.startswith("the lock store refused: ")
        assert told in text
        assert said in text.partition("; server reply: ")[2]
        assert "\n" not in text
        assert LOCK_PASSWORD not in text
    with lock:
        assert lock.locked()
    assert not lock.locked()


@pytest.mark.parametrize("db", [0, 1])
def test_a_server_that_wants_a_password_says_so(own: Server, admin: redis.Redis, db: int) -> None:
    admin.config_set("requirepass", "needed")
    try:
        error = failure(lock_at(own.url(db)))
        assert type(error) is StoreRefused
        assert "it wants a password: put it into dlock_url" in str(error)
    finally:
        admin.config_set("requirepass", "")


def test_a_server_without_a_connection_to_spare_is_not_ready_yet(own: Server, admin: redis.Redis) -> None:
    limit = admin.config_get("maxclients")["maxclients"]
    admin.config_set("maxclients", 1)
    try:
        error = failure(lock_at(own.lock_url()))
    finally:
        admin.config_set("maxclients", limit)
    assert type(error) is StoreNotReady
    assert "maxclients" in str(error)


def test_a_server_that_loads_its_data_is_not_ready_yet_and_then_knows_who_held(own: Server, admin: redis.Redis) -> None:
    lock = lock_at(own.lock_url())
    assert lock.acquire()
    with admin.pipeline() as pipe:
        for number in range(3000):  # it answers once in 1024 commands that it loads
            pipe.set(f"slow:{number}", "x")
        pipe.execute()
    seen: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        other = lock_at(own.lock_url())
        while not stop.wait(0.005):
            try:
                seen.append("taken" if other.acquire(blocking=False) else "held")
            except StoreUnavailable as error:
                seen.append(f"{type(error).__name__}: {error}")

    asking = threading.Thread(target=ask)
    own.stop()
    asking.start()
    own.start()
    eventually(lambda: seen[-1:] == ["held"], within=10)
    stop.set()
    asking.join(10)
    assert "taken" not in seen
    assert any(text.startswith("StoreNotReady: the lock store refused: it is loading its data; ") for text in seen)
    lock.release()
    assert not lock.locked()


@pytest.mark.invariant("refusing-store-is-unavailable")
@pytest.mark.parametrize("fault", [no_replicas_in_reach, replica], ids=lambda fault: fault.__name__)
def test_renewals_refused_in_the_middle_of_a_batch_are_unanswered_not_lost(
    own: Server, admin: redis.Redis, fault: Callable[[redis.Redis], "contextmanager[None]"]
) -> None:
    locks = [keys_of(str(number)) for number in range(1_000)]
    renewals = [Renewal(name_in(keys), "o.1", TTL) for keys in locks]
    over = threading.Event()

    def come_and_go() -> None:
        with admin_of(admin) as other:
            while not over.wait(0.003):
                with fault(other):  # type: ignore[attr-defined]  # it is a context manager
                    over.wait(0.003)

    with closing(store_at(own.lock_url(), timeout=5)) as store:
        for keys in locks:
            store.acquire(name_in(keys), "o.1", TTL, request_of())
        admin.delete(locks[7].lock)

        def renewed_in_part() -> bool:
            try:
                answers = store.renew(renewals)
            except StoreNotReady:
                return False  # the server refused all of them
            assert {place for place, answer in enumerate(answers) if answer is False} <= {7}
            return {True, None} <= set(answers)

        coming_and_going = threading.Thread(target=come_and_go)
        coming_and_going.start()
        try:
            eventually(renewed_in_part, within=30, every=0)
        finally:
            over.set()
            coming_and_going.join()
        assert store.renew(renewals) == [place != 7 for place in range(len(locks))]


@pytest.mark.invariant("refusing-store-is-unavailable")
def test_holder_keeps_and_releases_its_lock_while_memory_is_full(own: Server, admin: redis.Redis) -> None:
    lock = lock_at(own.lock_url())
    assert lock.acquire()
    with memory_full(admin):
        assert lock.lease is not None
        lock.lease.ensure()
        assert lock.acquire(), "an inner entry takes no memory"
        lock.release()
        lock.release()
        assert not lock.locked()
