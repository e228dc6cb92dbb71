"""A worker of `tests.support.apps.lost_acks`, of which the broker does not hear."""

import pytest
import redis

from tests.conftest import WORKERS
from tests.support.environments.lost_acks import APP
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield Urls(server.url(0), server.url(1), server.lock_url(2))


@pytest.fixture(scope="module")
def tasks(urls):
    with loaded_app(APP, urls) as tasks:
        yield tasks


@pytest.fixture(autouse=True)
def empty(urls):
    """The remains of a failed test would fail other tests."""
    with redis.Redis.from_url(urls.broker) as server:
        server.flushall()


@pytest.fixture
def worker(urls, tmp_path, request):
    with running_worker(APP, folder=tmp_path, urls=urls, concurrency=1) as worker:
        request.node.stash[WORKERS] = [worker]
        yield worker


@pytest.fixture
def broker(urls):
    with redis.Redis.from_url(urls.broker) as broker:
        yield broker
