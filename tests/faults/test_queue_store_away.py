"""The lock store is away while calls under the queue policy arrive: those that wait afterwards are in their order."""

from contextlib import ExitStack

import pytest

from tests.conftest import WORKERS
from tests.support.environments.queueing import APP, QueueEnvironment
from tests.support.polling import eventually
from tests.support.proxy import Proxy
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

CALLS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("away")
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "server"))
        locks = stack.enter_context(Server(folder / "locks"))
        proxy = stack.enter_context(Proxy(locks.port))
        urls = Urls(server.url(0), server.url(1), proxy.url(2))
        tasks = stack.enter_context(loaded_app(APP, urls))
        environment = QueueEnvironment(server, urls, tasks, folder)
        environment.holdings, environment.proxy = [], proxy
        worker = stack.enter_context(running_worker(APP, folder=folder, urls=urls, concurrency=2))
        environment.workers.append(worker)
        environment.listens()
        yield environment


@pytest.fixture
def environment(made, request):
    request.node.stash[WORKERS] = made.workers
    yield made
    made.proxy.set_mode("pass")
    made.let_all_go()


@pytest.mark.invariant("rank-follows-receipt", "queue-survives-faults")
def test_calls_received_while_the_store_is_away_wait_in_their_order_afterwards(environment):
    """Each is republished after a random delay, so they arrive again in any order."""
    task, n = environment.tasks.late, environment.fresh()
    holding = environment.hold(task, n)
    environment.proxy.set_mode("refuse")
    sent = [task.apply_async((n,)) for _ in range(CALLS)]
    for result in sent:
        environment.wait_for_line(result.id, "is republished")
    environment.proxy.set_mode("pass")
    environment.parked(task, n, *sent, within=60)
    holding.let_go()
    eventually(lambda: len(environment.order(n)) == CALLS + 1, 30)
    assert environment.order(n) == [holding.id, *(result.id for result in sent)]
