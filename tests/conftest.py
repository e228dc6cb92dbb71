"""Fixtures of every suite. A server that cannot start is an error, never a skip."""

import itertools
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Protocol

import hypothesis
import pytest
import redis
from celery import _state
from redis.utils import HIREDIS_AVAILABLE

from tests.support.chosen_store import CHOSEN
from tests.support.proxy import Proxy
from tests.support.rabbitmq import running_rabbitmq
from tests.support.servers import Server, server_binary
from tests.support.topology_fixtures import (  # noqa: F401  # fixtures are found by being here
    cluster_set,
    own_cluster,
    own_redlock,
    own_sentinels,
    own_tls_server,
    redlock_set,
    sentinel_set,
)
from tests.support.workers import Urls, Worker, loaded_app, running_worker

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background so, and every process of a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Several processes share two cores: an example may take its time, what it finds is the same.
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# Examples are alike on every Python and server; a few show that they are made there too.
hypothesis.settings.register_profile("lane", hypothesis.settings.get_profile("suite"), max_examples=20)
hypothesis.settings.load_profile("suite")

WORKERS = pytest.StashKey[list[Worker]]()


def pytest_report_header() -> list[str]:
    found = {name: version(name) for name in ("celery", "kombu", "redis") + ("hiredis",) * HIREDIS_AVAILABLE}
    versions = ", ".join(f"{name} {number}" for name, number in found.items())
    return [versions, f"server: {server_binary()}", *[f"locks in: {CHOSEN}"] * bool(CHOSEN)]


TESTS = Path(__file__).parent
#: Folders and files that take long, the longest first; all others come after them.
LONG = [
    "contract/test_hostile_messages.py",
    "worker/lost_acks",
    "model",
    "contract/test_rules.py",
    "worker/metrics",
    "contract/test_interruptions.py",
    "contract/test_queue_stateful.py",
    "worker",
    "faults",
]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A lane of what is marked `core` imports no other module: half of the suite, in each of its processes."""
    if not config.option.markexpr.startswith("core ") or not collection_path.match("test_*.py"):
        return None
    return "mark.core" not in collection_path.read_text() or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # At the end one process would be busy with a long one and the others idle.
    @cache
    def place(path: Path) -> int:
        # Not relative_to: a module outside of this folder may import this conftest.
        return next((number for number, long in enumerate(LONG) if path.is_relative_to(TESTS / long)), len(LONG))

    items.sort(key=lambda item: place(item.path))
    for item in items:
        if CHOSEN and (mark := item.get_closest_marker("redis_store")):
            item.add_marker(pytest.mark.skip(f"needs locks in Redis: {mark.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]  # pluggy sends the result into the wrapper
    if report.failed:
        for worker in item.stash.get(WORKERS, []):
            report.sections.append((f"log of {worker.node}", worker.tail(80)))
    return report  # type: ignore[return-value]  # pluggy sends the result into the wrapper


@pytest.fixture(autouse=True)
def no_tasks_of_other_tests() -> Iterator[None]:
    """Forget the apps and the shared tasks that the test made.

    ``app.task`` announces its task to every app that is made later, and ``shared_task`` to every app that exists.
    """
    shared, apps = set(_state._on_app_finalizers), set(_state._apps)  # type: ignore[attr-defined]  # not in the stubs
    yield
    _state._on_app_finalizers.intersection_update(shared)  # type: ignore[attr-defined]  # not in the stubs
    _state._apps.intersection_update(apps)  # type: ignore[attr-defined]  # not in the stubs


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """Restore the root logger, which a worker in this process sets up."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server shared by the tests of one xdist worker. It must stay up, and no test may rely on its data."""
    with Server(tmp_path_factory.mktemp("server")) as shared:
        yield shared


@pytest.fixture
def clean_server(server: Server) -> Server:
    """The shared server, emptied."""
    server.flush()
    return server


@pytest.fixture
def redis_url(clean_server: Server) -> str:
    """The shared server's database 0; the server was emptied before the test."""
    return clean_server.url()


@pytest.fixture
def lock_url(clean_server: Server) -> str:
    """The same database for the user who may keep locks and nothing else."""
    return clean_server.lock_url()


@pytest.fixture
def client(clean_server: Server) -> Iterator[redis.Redis]:
    """A client of `redis_url` that gives text and never tries again."""
    with clean_server.client() as connected:
        yield connected


class OwnServer(Protocol):
    def __call__(
        self,
        *,
        binary: Path | None = ...,
        persistent: bool = ...,
        options: Sequence[str] = ...,
        environ: Mapping[str, str] | None = ...,
        password: str | None = ...,
    ) -> Server: ...


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[OwnServer]:
    """A factory of started servers which the test may kill, pause and restart."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def start(
            *,
            binary: Path | None = None,
            persistent: bool = False,
            options: Sequence[str] = (),
            environ: Mapping[str, str] | None = None,
            password: str | None = None,
        ) -> Server:
            made = Server(
                tmp_path / f"server{next(numbers)}",
                binary=binary,
                persistent=persistent,
                options=options,
                environ=environ,
                password=password,
            )
            return stack.enter_context(made)

        yield start


UrlsFor = Callable[..., Urls]


@pytest.fixture
def urls_for(request: pytest.FixtureRequest) -> UrlsFor:
    """Turns broker=, result=, lock= into `Urls`; one left out is the shared server's."""

    def complete(broker: str | None = None, result: str | None = None, lock: str | None = None) -> Urls:
        if broker and result and lock:
            return Urls(broker, result, lock)
        shared: Server = request.getfixturevalue("clean_server")
        return Urls(broker or shared.url(), result or shared.url(), lock or shared.lock_url())

    return complete


class StartWorker(Protocol):
    def __call__(
        self,
        app: str,
        *args: str,
        pool: str = ...,
        concurrency: int = ...,
        broker: str | None = ...,
        result: str | None = ...,
        lock: str | None = ...,
        environ: Mapping[str, str] | None = ...,
    ) -> Worker: ...


@pytest.fixture
def start_worker(urls_for: UrlsFor, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartWorker]:
    """A factory of ready workers; all that is left of them is killed after the test."""
    started = request.node.stash.setdefault(WORKERS, [])
    with ExitStack() as stack:

        def start(
            app: str,
            *args: str,
            pool: str = "prefork",
            concurrency: int = 2,
            broker: str | None = None,
            result: str | None = None,
            lock: str | None = None,
            environ: Mapping[str, str] | None = None,
        ) -> Worker:
            context = running_worker(
                app,
                *args,
                folder=tmp_path,
                urls=urls_for(broker, result, lock),
                pool=pool,
                concurrency=concurrency,
                environ=environ,
            )
            worker = stack.enter_context(context)
            started.append(worker)
            return worker

        yield start


class LoadApp(Protocol):
    def __call__(
        self, module: str, *, broker: str | None = ..., result: str | None = ..., lock: str | None = ...
    ) -> ModuleType: ...


@pytest.fixture
def load_app(urls_for: UrlsFor) -> Iterator[LoadApp]:
    """Imports an app module (with an `app` in it) afresh in this process, to send tasks from."""
    with ExitStack() as stack:

        def load(
            module: str, *, broker: str | None = None, result: str | None = None, lock: str | None = None
        ) -> ModuleType:
            return stack.enter_context(loaded_app(module, urls_for(broker, result, lock)))

        yield load


@pytest.fixture
def start_proxy() -> Iterator[Callable[[Server], Proxy]]:
    """A factory of proxies in front of a server."""
    with ExitStack() as stack:

        def start(target: Server) -> Proxy:
            assert target.port is not None, "start the server first"
            return stack.enter_context(Proxy(target.port))

        yield start


@pytest.fixture(scope="session")
def rabbitmq_url() -> Iterator[str]:
    """A RabbitMQ broker (only for tests marked `servers`)."""
    with running_rabbitmq() as url:
        yield url
