"""Fixtures of the servers of every topology; conftest.py takes them in."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.topologies import ClusterSet, RedlockSet, SentinelSet, TlsServer

#: Silence after which a node counts as down. A test pauses one for less, on a machine that may stand still itself.
PATIENT_MS = 5000

# Started when the first test asks for them, and shared. Tests only talk to them: they must stay whole.


@pytest.fixture(scope="session")
def sentinel_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSet]:
    """A primary, two replicas and three sentinels, shared by the tests of one xdist worker."""
    with SentinelSet(tmp_path_factory.mktemp("sentinels"), down_after_ms=PATIENT_MS) as shared:
        yield shared


@pytest.fixture(scope="session")
def cluster_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSet]:
    """Three primaries with a replica each, shared by the tests of one xdist worker."""
    with ClusterSet(tmp_path_factory.mktemp("cluster"), node_timeout_ms=PATIENT_MS) as shared:
        yield shared


@pytest.fixture(scope="session")
def redlock_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedlockSet]:
    """Five independent servers, shared by the tests of one xdist worker. For three, take the first three."""
    with RedlockSet(tmp_path_factory.mktemp("redlock"), nodes=5) as shared:
        yield shared


# Factories of those that a test may break; they take the arguments of the class without its folder.


@pytest.fixture
def own_sentinels(tmp_path: Path) -> Iterator[Callable[..., SentinelSet]]:
    numbers = itertools.count()
    with ExitStack() as stack:

        def start(**options: Any) -> SentinelSet:
            return stack.enter_context(SentinelSet(tmp_path / f"sentinels{next(numbers)}", **options))

        yield start


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Callable[..., ClusterSet]]:
    numbers = itertools.count()
    with ExitStack() as stack:

        def start(**options: Any) -> ClusterSet:
            return stack.enter_context(ClusterSet(tmp_path / f"cluster{next(numbers)}", **options))

        yield start


@pytest.fixture
def own_redlock(tmp_path: Path) -> Iterator[Callable[..., RedlockSet]]:
    numbers = itertools.count()
    with ExitStack() as stack:

        def start(**options: Any) -> RedlockSet:
            return stack.enter_context(RedlockSet(tmp_path / f"redlock{next(numbers)}", **options))

        yield start


@pytest.fixture
def own_tls_server(tmp_path: Path) -> Iterator[Callable[..., TlsServer]]:
    """Only for tests marked `servers`."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def start(**options: Any) -> TlsServer:
            return stack.enter_context(TlsServer(tmp_path / f"tls{next(numbers)}", **options))

        yield start
