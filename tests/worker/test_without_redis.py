"""The first example of README.md with RabbitMQ and PostgreSQL, and no other server; a pool child is killed, too."""

import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from celery.exceptions import WorkerLostError

from celery_dlock import CallSkipped
from tests.support.polling import eventually
from tests.support.postgresql import running_postgresql
from tests.support.processes import ROOT
from tests.support.workers import Urls, running_worker

pytestmark = pytest.mark.servers

REDIS = 'broker="redis://localhost", backend="redis://localhost")'


@pytest.fixture
def shop(rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the README; a worker of it runs."""
    from tests.support.postgresql_stores import migrated_schema, url_of  # noqa: PLC0415  # needs psycopg

    example = re.findall(r"```python\n# shop\.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert example.count(REDIS) == 1
    with running_postgresql() as server, migrated_schema(server) as schema:
        servers = f'broker={rabbitmq_url!r}, backend="rpc://")\napp.conf.dlock_url = {url_of(server, schema)!r}'
        (tmp_path / "shop.py").write_text(example.replace(REDIS, servers))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "shop", raising=False)
        made = importlib.import_module("shop")
        environ = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        with running_worker("shop", folder=tmp_path / "worker", urls=Urls("", "", ""), environ=environ):
            yield made
        made.app.close()
        monkeypatch.delitem(sys.modules, "shop")


def test_readme_example_runs_with_rabbitmq_and_postgresql_alone(shop: ModuleType) -> None:
    task = shop.import_orders
    first = task.delay("berlin")
    eventually(task.lock_for("berlin").locked, within=20)
    second, other = task.delay("berlin"), task.delay("paris")
    with pytest.raises(CallSkipped, match=first.id):
        second.get(timeout=20)
    assert second.state == "REVOKED"
    assert [first.get(timeout=20), other.get(timeout=20)] == ["orders of berlin imported", "orders of paris imported"]
    assert task.delay("berlin").get(timeout=20) == "orders of berlin imported"


def test_lock_of_a_killed_child_is_free_within_a_second(shop: ModuleType) -> None:
    task, lock = shop.import_orders, shop.import_orders.lock_for("berlin")
    killed = task.delay("berlin")
    holder = eventually(lock.holder, within=20)
    os.kill(holder.pid, signal.SIGKILL)
    died = seen = time.monotonic()

    def free() -> bool:
        nonlocal seen
        looked = time.monotonic()
        if lock.locked():
            seen = looked
        return seen < looked

    eventually(free, within=10)
    assert seen - died < 1.0
    with pytest.raises(WorkerLostError):
        killed.get(timeout=20)
    assert task.delay("berlin").get(timeout=20) == "orders of berlin imported"
