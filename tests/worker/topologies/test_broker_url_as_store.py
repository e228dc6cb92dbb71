"""Without dlock_url, locks are where the broker is: behind sentinels, or over TLS."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import redis
from celery.exceptions import TaskRevokedError

from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.topologies import SentinelSet, TlsServer
from tests.support.workers import Urls, loaded_app, running_worker

APP = "tests.support.apps.borrowing"


def run_twice_at_once(tasks: ModuleType, store: redis.Redis) -> None:
    first = tasks.once.delay(1)
    eventually(lambda: tasks.notes.lrange("began", 0, -1) == ["1"], 20)
    assert [key.rpartition(":lock:")[2] for key in store.keys("dlock:*:lock:*")] == [tasks.once.lock_name(1)]
    with pytest.raises(TaskRevokedError):
        tasks.once.delay(1).get(timeout=20)
    tasks.notes.rpush("gate", "")
    assert first.get(timeout=20) == "ran"
    assert tasks.notes.lrange("began", 0, -1) == ["1"]
    eventually(lambda: not store.keys("dlock:*:lock:*"))


@pytest.mark.invariant("locks-use-celerys-connection")
@pytest.mark.core
def test_a_broker_behind_sentinels_keeps_the_locks_on_its_primary(
    sentinel_set: SentinelSet, clean_server: Server, tmp_path: Path
) -> None:
    sentinel_set.flush()
    urls = Urls(sentinel_set.url(0), sentinel_set.url(1), clean_server.url(3))
    with (
        running_worker(APP, folder=tmp_path, urls=urls) as worker,
        loaded_app(APP, urls) as tasks,
        sentinel_set.primary().client() as store,
    ):
        worker.wait_for_log(r"INFO.*locks: sentinel://127.0.0.1:\d+/0;sentinel://127.0.0.1:\d+/0;")
        run_twice_at_once(tasks, store)


@pytest.mark.servers
@pytest.mark.parametrize("mutual", [False, True])
def test_a_broker_over_tls_keeps_the_locks_over_tls(
    own_tls_server: Callable[..., TlsServer], clean_server: Server, tmp_path: Path, mutual: bool
) -> None:
    secure = own_tls_server(mutual=mutual)
    urls = Urls(secure.url(0), secure.url(1), clean_server.url(3))
    with (
        running_worker(APP, folder=tmp_path, urls=urls) as worker,
        loaded_app(APP, urls) as tasks,
        secure.client() as store,
    ):
        worker.wait_for_log(rf"INFO.*locks: rediss://127.0.0.1:{secure.port}/0, prefix")
        run_twice_at_once(tasks, store)
