"""``LockControl.workers()`` and ``dlock list --workers``: what live workers say, and what is said without an answer."""

import json
import signal
from importlib.metadata import version

import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from celery.utils.collections import AttributeDict
from click.testing import CliRunner
from kombu.transport.memory import Transport as MemoryTransport
from kombu.utils.objects import cached_property

from celery_dlock.control import LockControl
from celery_dlock.control.workers import _views
from celery_dlock.messaging.wire import WIRE_VERSION
from celery_dlock.worker.inspection import _health, held_locks
from tests.support.lock_records import forget, held
from tests.support.polling import eventually
from tests.support.servers import LOCK_USER, OPERATOR_USER

APP = "tests.support.apps.operating"
#: The answer of a worker before it told of its losses and counters.
WHOLE = {"version": "9", "pool": "p", "pid": 7, "watchdog": "ok", "scanned": 0.1, "held": 0, "leases": []}


class WithoutFanout(MemoryTransport):
    """A broker like SQS, which knows no exchange of the type fanout."""

    @cached_property
    def implements(self):
        return MemoryTransport.implements.extend(exchange_type=frozenset(["direct"]))


@pytest.fixture
def operator(load_app, lock_url):
    """An app with an operator's rights, and a LockControl of it."""
    module = load_app(APP)
    module.app.conf.dlock_url = lock_url.replace(f"{LOCK_USER}:", f"{OPERATOR_USER}:")
    with LockControl(module.app) as control:
        yield module, control


def elsewhere(lock_url, broker, **conf):
    app = Celery("elsewhere", broker=broker, set_as_current=False)
    app.conf.update(dlock_url=lock_url, **conf)
    return LockControl(app)


@pytest.mark.core
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_worker_tells_what_it_holds_its_pool_and_its_watchdog(start_worker, operator, pool):
    module, control = operator
    worker = start_worker(APP, pool=pool)
    held = module.sync.delay("ada", secret="s3cret")  # it must not be shown
    eventually(lambda: control.locks().items, within=20)
    # The child writes its record as held after the store has the lock.
    eventually(lambda: control.workers().workers[0].held == 1, within=10)
    found = control.workers()
    (view,) = found.workers
    assert found.problem == ""
    assert (view.worker, view.pool, view.watchdog, view.held) == (worker.node, pool, "ok", 1)
    assert (view.version, view.wire) == (version("celery-dlock"), WIRE_VERSION)
    assert view.pid == worker.pid
    assert view.scanned < 5
    (lease,) = view.leases
    holder = control.lock(lease.name).holder
    assert (lease.task, lease.task_id, lease.acquisition) == ("shop.sync", held.id, holder.acquisition)
    assert (lease.pid, lease.ttl, 0 < lease.expires_in <= 10) == (holder.pid, 10, True)
    assert "s3cret" not in repr(found)
    module.history.rpush("gate:ada", "open")
    held.get(timeout=20)
    eventually(lambda: control.workers().workers[0].held == 0, within=10)


@pytest.mark.core
def test_list_of_workers_shows_a_row_for_each_lease_and_json(start_worker, operator):
    module, control = operator
    worker = start_worker(APP)
    for customer in ("ada", "bob"):
        module.sync.delay(customer)
    eventually(lambda: len(control.locks().items) == 2, within=20)
    eventually(lambda: control.workers().workers[0].held == 2, within=10)

    def run(*words):
        return CliRunner().invoke(celery_command, ["-A", APP, "dlock", "list", "--workers", *words])

    names, *rows = (line.split("\t") for line in run().stdout.splitlines())
    assert names == ["WORKER", "POOL", "VERSION", "WATCHDOG", "NAME", "TASK", "TASK ID", "PROCESS", "TIME LEFT"]
    assert [row[:2] + row[3:4] for row in rows] == [[worker.node, "prefork", "ok"]] * 2
    assert sorted(row[4].split(":")[1] for row in rows) == ["ada", "bob"]
    (one,) = run("--name", "shop.sync:bob:*", "--no-headers").stdout.splitlines()
    assert "shop.sync:bob:" in one
    assert "(holds nothing that matches)" in run("--task", "shop.other").stdout
    document = json.loads(run("--json").stdout)
    assert [len(item["leases"]) for item in document["items"]] == [2]
    assert run("--state", "held").exit_code == 2
    for customer in ("ada", "bob"):
        module.history.rpush(f"gate:{customer}", "open")


@pytest.mark.core
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_worker_tells_its_lost_leases(start_worker, operator, clean_server, pool):
    module, control = operator
    worker = start_worker(APP, pool=pool)
    module.sync.delay("ada")
    eventually(lambda: control.locks().items, within=20)
    assert control.workers().workers[0].lost == 0
    for key in held(clean_server):
        forget(clean_server, key)
    worker.wait_for_log("the lease of shop.sync:ada:.* is lost")
    eventually(lambda: control.workers().workers[0].lost == 1, within=10)
    assert control.workers().workers[0].counters is None  # its metrics are off
    module.history.rpush("gate:ada", "open")


def test_dashboard_shows_lost_leases_and_conflicts_of_workers(start_worker, operator, clean_server):
    for package in ("prometheus_client", "starlette"):
        pytest.importorskip(package, reason="installed in the main lane only")
    from starlette.testclient import TestClient  # noqa: PLC0415

    from celery_dlock.web import dashboard  # noqa: PLC0415

    module, control = operator
    worker = start_worker(APP, environ={"DLOCK_TEST_CONF": json.dumps({"dlock_metrics_port": 0})})
    module.sync.delay("ada")
    eventually(lambda: control.locks().items, within=20)
    for _ in range(2):
        module.sync.delay("ada")
    expected = {"acquired": {"shop.sync": {"": 1}}, "conflicts": {"shop.sync": {"skipped": 2}}, "lost": {}}
    eventually(lambda: control.workers().workers[0].counters == expected, within=20)
    for key in held(clean_server):
        forget(clean_server, key)
    worker.wait_for_log("the lease of shop.sync:ada:.* is lost")
    expected["lost"] = {"shop.sync": {"forgotten": 1}}
    eventually(lambda: control.workers().workers[0].counters == expected, within=10)
    web = TestClient(dashboard(module.app), base_url="http://localhost")
    eventually(lambda: "<b>1</b> lost in the last hour" in web.get("/").text, within=10)
    assert "leases; by 1 live worker<" in web.get("/").text
    text = web.get("/tasks").text
    assert "The conflicts are those of 1 live worker," in text
    assert "Conflicts: 2 skipped." in text
    assert '<td class="number">1</td></tr>' in web.get("/workers").text
    module.history.rpush("gate:ada", "open")


@pytest.mark.core
def test_stopped_worker_is_reported_as_no_answer(start_worker, operator):
    _, control = operator
    worker = start_worker(APP, pool="threads")
    eventually(lambda: control.workers().workers, within=10)
    worker.signal(signal.SIGSTOP)
    assert control.workers(timeout=0.2).problem == "no worker answered within 0.2 s"
    result = CliRunner().invoke(celery_command, ["-A", APP, "dlock", "list", "--workers"])
    assert (result.exit_code, "no worker answered" in result.output) == (1, True)


def test_broker_without_remote_control_is_reported(lock_url):
    with elsewhere(lock_url, "memory://", broker_transport=f"{__name__}:WithoutFanout") as control:
        assert "has no remote control" in control.workers().problem


def test_remote_control_that_is_off_is_reported(lock_url):
    with elsewhere(lock_url, "memory://", worker_enable_remote_control=False) as control:
        assert "remote control is off" in control.workers().problem


def test_broker_that_is_away_is_reported_and_raises_nothing(lock_url):
    with elsewhere(lock_url, "redis://127.0.0.1:1/0") as control:
        found = control.workers(timeout=0.2)
    assert (found.unreachable, "the broker did not answer" in found.problem) == (True, True)


def test_broker_that_hangs_is_reported_in_time(lock_url, own_server):
    """A stopped broker accepts connections, and never answers."""
    broker = own_server()
    broker.pause()
    with elsewhere(lock_url, broker.url()) as control:
        found = control.workers(timeout=0.2)
    broker.resume()
    assert (found.unreachable, "did not answer" in found.problem) == (True, True)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"error": "KeyError('dlock')"}, "it does not know the command"),
        ({"error": "boom"}, "boom"),
        ({"version": "9", "pool": "solo", "pid": 7, "problem": "dlock_enabled is off"}, "dlock_enabled is off"),
        (["nonsense"], "cannot be read"),
        (None, "cannot be read"),
        ({"version": "9", "pool": "solo", "pid": 7, "scanned": None, "held": 1, "leases": [[1]]}, "cannot be read"),
        ({**WHOLE, "counters": {"conflicts": {"shop.sync": 3}}}, "cannot be read"),
    ],
)
def test_unusable_answer_is_shown_as_a_problem(answer, problem):
    (view,) = _views({"w1": answer})
    assert (view.worker, problem in view.problem, view.leases) == ("w1", True, ())


@pytest.mark.parametrize(
    ("running", "scanned", "held", "watchdog"),
    [
        (True, 0.1, 1, "ok"),
        (True, None, 0, "ok"),
        (True, 60.0, 1, "late"),
        (False, 60.0, 1, "dead"),
        (False, 60.0, 0, "idle"),
    ],
)
def test_watchdog_health_follows_from_its_last_round(running, scanned, held, watchdog):
    assert _health(running=running, scanned=scanned, held=held) == watchdog


def test_losses_and_counters_that_an_older_worker_does_not_tell_are_unknown():
    (view,) = _views({"w": WHOLE})
    assert (view.problem, view.lost, view.counters) == ("", None, None)
    counters = {"conflicts": {"shop.sync": {"skipped": 3}}}
    (view,) = _views({"w": {**WHOLE, "lost": 2, "counters": {**counters, "of a newer version": 7}}})
    assert (view.lost, view.counters) == (2, counters)


def test_worker_that_takes_no_locks_says_so():
    app = Celery("off", broker="memory://", set_as_current=False)
    answer = held_locks(AttributeDict(app=app, consumer=None))
    assert "it takes no locks" in answer["problem"]
