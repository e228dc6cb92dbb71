"""``lease.settle``: one row for each number, while pool children, workers and the database server are killed."""

import os
import random
import signal
import time
from contextlib import ExitStack, suppress

import psycopg
import pytest

from tests.support.environ import environment_variables
from tests.support.polling import eventually
from tests.support.postgresql import own_postgresql
from tests.support.postgresql_stores import migrated_schema, url_of
from tests.support.servers import Server
from tests.support.workers import Urls, loaded_app, running_worker

pytestmark = [
    pytest.mark.servers, pytest.mark.usefixtures("show_logs"),
    pytest.mark.invariant("settled-run-is-used-with-its-rows"),
]  # fmt: skip

APP = "tests.support.apps.settling"
#: The kills of one round, in random order, and the seconds between two of them.
ROUND = "child", "child", "child", "child", "worker", "server"
PAUSE = 0.2, 0.8


class Environment:
    """Two workers, their database, and the broker."""

    def __init__(self, stack, folder):
        self.stack, self.folder, self.chance = stack, folder, random.Random(7)
        self.database = stack.enter_context(own_postgresql())
        schema = stack.enter_context(migrated_schema(self.database.url))
        self.execute("CREATE TABLE booking (number int)")
        server = stack.enter_context(Server(folder / "server"))
        self.urls = Urls(server.url(0), server.url(1), url_of(self.database.url, schema, user="postgres"))
        stack.enter_context(environment_variables({"DLOCK_TEST_DATABASE": self.database.url}))
        self.tasks = stack.enter_context(loaded_app(APP, self.urls))
        stack.callback(self.tasks.book.dlock.lock_store.close)
        self.workers = [self.start_worker() for _ in range(2)]
        self.killed = {"child": 0, "worker": 0, "server": 0}

    def start_worker(self):
        return self.stack.enter_context(running_worker(APP, folder=self.folder, urls=self.urls, concurrency=2))

    def execute(self, statement):
        with psycopg.connect(self.database.url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def numbers(self):
        return [number for (number,) in self.execute("SELECT number FROM booking ORDER BY number")]

    def kill(self, kind):
        place = self.chance.randrange(2)
        if kind == "server":
            self.database.kill()
            self.database.start()
        elif kind == "worker":
            self.workers[place].kill()
            self.workers[place] = self.start_worker()
        elif children := self.workers[place].children():
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(children), signal.SIGKILL)
        self.killed[kind] += 1

    def kill_until(self, done, within):
        """Kill at random, in whole rounds, until the work is done."""
        end = time.monotonic() + within
        while not done():
            assert time.monotonic() < end, f"not done after {within} s and the kills {self.killed}"
            for kind in self.chance.sample(ROUND, len(ROUND)):
                time.sleep(self.chance.uniform(*PAUSE))
                self.kill(kind)


@pytest.fixture
def environment(tmp_path):
    with ExitStack() as stack:
        yield Environment(stack, tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("calls", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_each_row_is_written_once_and_no_outcome_is_unknown(environment, calls):
    expected, book = list(range(calls)), environment.tasks.book
    results = [book.delay(number) for number in expected * 2]
    environment.kill_until(lambda: set(environment.numbers()) == set(expected), within=calls + 200)
    # Duplicates and copies of killed runs may still come.
    eventually(lambda: {book.used(number).state for number in expected} == {"used"}, 120)
    eventually(lambda: all(result.ready() for result in results), 120)
    assert environment.numbers() == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_some_row_is_written_twice_without_settle(environment):
    """The control: the same calls and kills, with a guard only."""
    expected = list(range(300))
    for number in expected * 2:
        environment.tasks.book.delay(number, settled=False)
    environment.kill_until(lambda: len(environment.numbers()) > len(set(environment.numbers())), within=300)
