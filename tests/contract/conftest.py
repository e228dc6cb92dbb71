"""The contract over every topology: `store`, `lock_url`, `client` and `app` are those of the topology of the test.

A module that talks to locks through `store`, and to their keys through `client`, stands in `OVER` and runs over the
others too. All other modules look at one server closely: at its commands, its connections, its memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

import pytest
import redis
from celery import Celery

from celery_dlock.config.locations import locations_from_settings
from celery_dlock.control import LockControl
from celery_dlock.runtime import Runtime
from celery_dlock.store.engine.store import EngineStore
from celery_dlock.store.factory import open_store
from celery_dlock.store.memory.backend import MemoryBackend
from celery_dlock.store.redis.store import RedisStore
from tests.contract.helpers import load_scripts
from tests.contract.majority import ManyClients, Settled
from tests.support.backends import CHOSEN
from tests.support.faulty_backend import Fault, FaultyBackend, Resending, conflict, lost_reply, one_in_three
from tests.support.postgresql import running_pgbouncer, running_postgresql
from tests.support.proxy import Proxy
from tests.support.servers import LOCK_USER, OPERATOR_USER, Server
from tests.support.topologies import MASTER_NAME, ClusterSet, RedlockSet, SentinelSet, TlsServer

MakeApp = Callable[..., Celery]
LockUrl = str | list[str]

STANDALONE, TLS = "standalone", "tls"
#: The engine over a backend: every test that does not look at Redis keys through `client`.
MEMORY, POSTGRESQL, PGBOUNCER, MARIADB = "memory", "postgresql", "pgbouncer", "mariadb"
#: Behind the name of a backend: one commit of three fails. The engine must hide it.
FAULTS: Final[Mapping[str, Fault]] = {"-conflicts": conflict, "-lost-replies": lost_reply}
FAULTY: Final = tuple(backend + fault for backend in {MEMORY: 0, CHOSEN: 0} for fault in FAULTS if backend)
PROVEN: Final = (MEMORY, POSTGRESQL, MARIADB, *FAULTY)
ENGINES: Final = (*PROVEN, PGBOUNCER)
SENTINEL, CLUSTER, REDLOCK3, REDLOCK5 = "sentinel", "cluster", "redlock3", "redlock5"

#: Those that need packages of the distribution.
DISTRIBUTION: Final = (TLS, *(engine for engine in ENGINES if not engine.startswith(MEMORY)))

#: Over which topologies a module runs beside the single server.
OVER: Final[Mapping[str, Sequence[str]]] = {
    "test_store": (SENTINEL, CLUSTER, REDLOCK3, REDLOCK5, TLS, PGBOUNCER),
    "test_store_waiting": (SENTINEL, CLUSTER, REDLOCK3, REDLOCK5, TLS, PGBOUNCER),
    "test_store_marks": (CLUSTER, REDLOCK3),
    "test_store_uses": (CLUSTER, REDLOCK3),
    "test_keep_on_retry": (CLUSTER, REDLOCK3),
    "test_seats": (CLUSTER,),
    "test_seats_queue": (CLUSTER,),
    "test_seats_operators": (CLUSTER,),
    "test_replace": (),
    "test_control_reads": (SENTINEL, CLUSTER),
    "test_control_actions": (CLUSTER,),
    "test_claims": (CLUSTER,),  # and no claims or queues on Redlock
    "test_queue_grants": (CLUSTER,),
    "test_queue_parking": (CLUSTER,),
    "test_queue_resends": (CLUSTER,),
    "test_queue_turns": (CLUSTER, PGBOUNCER),
    "test_queue_waiters": (CLUSTER,),
}

_PROXY: Final = "it stands behind a proxy, in front of one server"
#: Classes and tests of them that run on the single server only, and why.
NOT_OVER: Final[Mapping[str, str]] = {
    "test_store_uses::TestLostReplies": _PROXY,
    "test_claims::test_a_claim_whose_reply_is_lost_is_ours_and_is_given_up_once": _PROXY,
    "test_store_waiting::test_wake_up_refused_for_another_reason_logs_no_missing_right": "it sets up one server",
}
_QUEUES: Final = "it is about waiters in the queue, of which Redlock has none"
#: ... and why on Redlock alone they do not.
NOT_ON_REDLOCK: Final[Mapping[str, str]] = {"test_keep_on_retry::TestWaiters": _QUEUES}
_FIRST: Final = "it looks at an answer that only the first copy of a command can get"
#: ... and why not where a command is sent twice because its reply was lost.
NOT_RESENT: Final[Mapping[str, str]] = dict.fromkeys(
    (
        "test_claims::test_a_message_that_ends_leaves_the_claim_of_its_own_retry",
        "test_control_actions::TestAudit",
        "test_control_actions::TestHold",
        "test_control_actions::TestRelease",
        "test_queue_grants::test_wake_up_of_an_ended_grant_reaches_the_caller_that_waits",
        "test_seats::test_acquisition_that_was_rolled_back_takes_no_seat_later",
        "test_seats::test_call_that_was_woken_marks_the_seats_that_others_took_meanwhile",
        "test_seats::test_duplicate_is_found_at_every_seat_also_above_the_limit_of_its_worker",
        "test_seats::test_release_of_any_seat_wakes_one_waiting_call",
        "test_seats::test_release_that_is_sent_twice_does_not_free_another_holders_seat",
        "test_seats_operators::test_release_by_name_frees_that_seat_only",
        "test_store_marks::test_a_copy_flagged_redelivered_of_a_done_identity_is_a_duplicate",
        "test_store_marks::test_a_done_mark_speaks_of_one_identity_only",
        "test_store_marks::test_a_duplicate_is_known_also_while_another_holds_the_lock",
        "test_store_marks::test_a_rank_is_the_servers_time_less_the_age",
        "test_store_marks::test_republished_copy_of_doubtful_age_is_a_duplicate_within_its_doubt",
    ),
    _FIRST,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if "topology" not in metafunc.fixturenames or module not in OVER:
        return
    names = [f"{module}::{place}" for place in (metafunc.cls and metafunc.cls.__name__, metafunc.function.__name__)]
    over = [*OVER[module], *PROVEN]
    if {"client", "proxy", "clean_server"} & set(metafunc.fixturenames):
        over = [topology for topology in over if topology not in ENGINES]
    others = [pytest.param(topology, marks=_marks(topology, names)) for topology in over]
    metafunc.parametrize("topology", [STANDALONE, *others], indirect=True)


def _marks(topology: str, names: Sequence[str]) -> list[pytest.MarkDecorator]:
    reasons = {
        **NOT_OVER,
        **(NOT_ON_REDLOCK if topology.startswith("redlock") else {}),
        **(NOT_RESENT if topology.endswith("-lost-replies") else {}),
    }
    marks = [pytest.mark.skip(reason=reasons[name]) for name in names if name in reasons]
    marks += [pytest.mark.topologies] if topology not in ENGINES else []
    return [*marks, pytest.mark.servers] if topology in DISTRIBUTION else marks


@pytest.fixture
def topology(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", STANDALONE))


Servers = Server | SentinelSet | ClusterSet | RedlockSet


@pytest.fixture
def servers(topology: str, request: pytest.FixtureRequest) -> Servers:
    """Those of the topology, emptied."""
    fixtures = {
        STANDALONE: "server",
        **dict.fromkeys(ENGINES, "server"),
        SENTINEL: "sentinel_set",
        CLUSTER: "cluster_set",
        TLS: "tls_server",
    }
    found: Servers = request.getfixturevalue(fixtures.get(topology, "redlock_set"))
    if isinstance(found, ClusterSet):
        request.getfixturevalue("cluster_client").flushall()
    else:
        found.flush()
    return found


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with TlsServer(tmp_path_factory.mktemp("tls") / "server") as made:
        yield made


@pytest.fixture(scope="session")
def cluster_client(cluster_set: ClusterSet) -> Iterator[redis.RedisCluster]:
    """Made once, because it asks all nodes for all that it needs to know."""
    with closing(cluster_set.client()) as connected:
        # Else one node answers for all.
        connected.keys = partial(connected.keys, target_nodes=redis.RedisCluster.PRIMARIES)  # type: ignore[method-assign]
        yield connected


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    with running_postgresql() as url:
        yield url


@pytest.fixture(scope="session")
def pgbouncer(postgresql: str) -> Iterator[str]:
    with running_pgbouncer(postgresql) as url:
        yield url


@pytest.fixture
def schema(postgresql: str) -> Iterator[str]:
    """A schema of PostgreSQL with the tables of this test."""
    from tests.support.postgresql_stores import migrated_schema  # noqa: PLC0415  # psycopg is in the main lane only

    with migrated_schema(postgresql) as made:
        yield made


@pytest.fixture
def postgresql_url(postgresql: str, schema: str) -> str:
    from tests.support.postgresql_stores import url_of  # noqa: PLC0415  # see above

    return url_of(postgresql, schema)


@pytest.fixture
def pgbouncer_url(pgbouncer: str, schema: str) -> str:
    from tests.support.postgresql_stores import url_of  # noqa: PLC0415  # see above

    return url_of(pgbouncer, schema)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[Any]:
    from tests.support.mariadb import running_mariadb  # noqa: PLC0415  # PyMySQL is in the main lane only

    with running_mariadb() as server:
        yield server


@pytest.fixture
def mariadb_url(mariadb: Any) -> Iterator[str]:
    """The URL of a database with the tables of this test."""
    from tests.support.mysql_stores import migrated_database, url_of  # noqa: PLC0415  # see above

    with migrated_database(mariadb) as made:
        yield url_of(mariadb, made)


@pytest.fixture(params=["postgresql", "mariadb"])
def sql_url(request: pytest.FixtureRequest) -> str:
    """The URL of a store in each database, with the tables of this test."""
    return str(request.getfixturevalue(f"{request.param}_url"))


def _most(topology: str) -> int:
    return 3 if topology == REDLOCK3 else 5


def _let_commits_fail(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    init, fails = EngineStore.__init__, one_in_three(1)

    def faulty(store: EngineStore, backend: Any) -> None:
        init(store, FaultyBackend(backend, fails, fault))  # type: ignore[arg-type]

    monkeypatch.setattr(EngineStore, "__init__", faulty)


@pytest.fixture
def lock_url(
    topology: str, servers: Servers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> LockUrl:
    """``dlock_url`` for the user who may keep locks and nothing else."""
    if topology in ENGINES:
        backend, _, fault = topology.partition("-")
        if fault:
            _let_commits_fail(FAULTS[f"-{fault}"], monkeypatch)
        return "memory://" if backend == MEMORY else str(request.getfixturevalue(f"{backend}_url"))
    if isinstance(servers, RedlockSet):
        return servers.lock_urls()[: _most(topology)]
    if isinstance(servers, SentinelSet):
        return f"{servers.lock_url()}?master_name={MASTER_NAME}"
    return servers.lock_url()


@pytest.fixture
def client(topology: str, servers: Servers, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Sees and changes the keys of locks behind the store's back; of independent servers it changes all."""
    if isinstance(servers, RedlockSet):
        with ManyClients([node.client() for node in servers.nodes[: _most(topology)]]) as many:
            yield many
    elif isinstance(servers, ClusterSet):
        yield request.getfixturevalue("cluster_client")
    else:
        with closing(servers.client()) as connected:
            yield connected


@pytest.fixture
def memory_data() -> dict[str, Any]:
    """The data of ``memory://`` in this test: otherwise each app would have its own."""
    return {"memory dlock": MemoryBackend()}


@pytest.fixture
def store(lock_url: LockUrl, memory_data: dict[str, Any]) -> Iterator[RedisStore]:
    locations = locations_from_settings(lock_url, {})
    if lock_url == "memory://":
        locations[0].shared.update(memory_data)
    made = open_store(locations, timeout=5, prefix="dlock")
    # Redlock's has the same verbs.
    yield Settled(made) if isinstance(lock_url, list) else Resending(made)  # type: ignore[misc]
    made.close()


@pytest.fixture
def make_app(lock_url: LockUrl, memory_data: dict[str, Any]) -> MakeApp:
    def make(url: LockUrl = lock_url, **conf: Any) -> Celery:
        app = Celery("plain", broker="memory://", set_as_current=False)
        app.conf.update(dlock_url=url, **conf)
        if url == "memory://":
            Runtime.of(app).settings.locations[0].shared.update(memory_data)
        return app

    return make


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app()


@pytest.fixture
def control(make_app: MakeApp, lock_url: str) -> Iterator[LockControl]:
    """The operator's view of the locks at ``lock_url``, with an operator's rights."""
    with LockControl(make_app(lock_url.replace(f"{LOCK_USER}:", f"{OPERATOR_USER}:"))) as made:
        yield made


@pytest.fixture
def proxy(clean_server: Server, start_proxy: Callable[[Server], Proxy], client: redis.Redis) -> Proxy:
    """A proxy before a server that knows all scripts: a reply that it cuts is never that of a missing script."""
    load_scripts(client)
    return start_proxy(clean_server)
