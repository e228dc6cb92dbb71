"""Hosts apart, each in a network namespace of its own: one is cut off from all others by a packet filter."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from celery_dlock.store.redis.scripts import SCRIPTS
from tests.conftest import WORKERS
from tests.support.environ import environment_variables
from tests.support.environments.network import APP, BEHIND, BESIDE, COMEBACK, TTL, Notes
from tests.support.namespaces import Host, hosts, inside
from tests.support.polling import eventually
from tests.support.scripts import shas
from tests.support.servers import LOCK_PASSWORD, LOCK_USER, Server
from tests.support.workers import Urls, Worker, loaded_app, running_worker

#: A packet that was dropped is sent again later and later: after twice the time for which it was dropped, at worst.
AFTERWARDS = 60.0
SLACK = 1.0

#: Everyone may come in: the server listens on all cables.
OPEN = ("--bind", "0.0.0.0", "--protected-mode", "no")

pytestmark = pytest.mark.servers


class Environment:
    """Broker, store and results on the test's host; a worker on one that will be cut off, and one on another."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.notes = Notes(folder / "notes")
        self.far, other = stack.enter_context(hosts(2))
        server = stack.enter_context(Server(folder / "server", options=OPEN))
        self.client = stack.enter_context(server.client())
        stack.enter_context(
            environment_variables({"DLOCK_TEST_NOTES": str(folder / "notes"), "DLOCK_TEST_DIRECT_URL": ""})
        )
        self.tasks = stack.enter_context(loaded_app(APP, Urls(server.url(), server.url(1), server.lock_url())))

        def worker(host: Host, queue: str) -> Worker:
            place = f"{host.home}:{server.port}"
            lock = f"redis://{LOCK_USER}:{LOCK_PASSWORD}@{place}/0"
            urls = Urls(f"redis://{place}/0", f"redis://{place}/1", lock)
            with inside(host.name):
                return stack.enter_context(running_worker(APP, "-Q", queue, folder=folder, urls=urls))

        self.cut_off, self.beside = worker(self.far, BEHIND), worker(other, BESIDE)

    def send(self, task: str, *args: Any, queue: str = BEHIND) -> Any:
        return getattr(self.tasks, task).apply_async(args, queue=queue)

    def lost(self, start: dict[str, Any]) -> list[dict[str, Any]]:
        return self.notes.all(start["key"].partition(":lock:")[2], "lost")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    with ExitStack() as stack:
        yield Environment(tmp_path_factory.mktemp("namespaces"), stack)


@pytest.fixture(autouse=True)
def environment(made: Environment, request: pytest.FixtureRequest) -> Environment:
    request.node.stash[WORKERS] = [made.cut_off, made.beside]
    return made


def test_a_host_that_is_cut_off_for_less_than_the_ttl_keeps_its_lock(environment: Environment) -> None:
    result = environment.send("works", "brief", TTL + 0.8)
    start = environment.notes.first("brief", "start")
    eventually(lambda: time.monotonic() - start["at"] > 0.5)
    environment.far.cut_off()
    eventually(lambda: time.monotonic() - start["at"] > 1.3)
    environment.far.mend()
    while not environment.notes.all("brief", "end"):
        acq = environment.client.hget(start["key"], "acq")
        assert acq == start["acq"] or environment.notes.all("brief", "end")
        time.sleep(0.05)
    assert result.get(timeout=AFTERWARDS) is True
    assert environment.lost(start) == []


@dataclass(frozen=True)
class Story:
    """A host is cut off for longer than the ttl, and is connected again while the next body runs elsewhere."""

    cut_off_at: float
    start: dict[str, Any]
    successor: dict[str, Any]
    successor_ended: dict[str, Any]
    owner_after_late_release: str
    ends: list[bool]
    """The story of the body that was cut off, of the successor, and of the message that the lonely worker had."""


@pytest.fixture(scope="module")
def story(made: Environment, tmp_path_factory: pytest.TempPathFactory) -> Story:
    gate = tmp_path_factory.mktemp("gate") / "open"
    held, beside = made.send("insists", "row", TTL + 2), made.send("works", "another", 1.0)
    start, _ = made.notes.first("row", "start"), made.notes.first("another", "start")
    third = made.send("works", "third", 0)
    made.cut_off.wait_for_log(rf"{third.id}\] received")
    made.far.cut_off()
    try:
        cut_off_at = time.monotonic()
        successor_result = made.send("works", "row", 100, str(gate), queue=BESIDE)
        successor = eventually(lambda: made.notes.all("row", "start")[1:], 20, message="nobody goes on")[0]
        made.notes.first("row", "end")
        # Before the connection is restored: the release may arrive at once.
        with made.client.monitor() as monitor:  # type: ignore[no-untyped-call]
            made.far.mend()
            said = (line["command"] for line in monitor.listen())
            next(
                command
                for command in said
                if any(sha in command for sha in shas(SCRIPTS["release"])) and start["acq"] in command
            )
    finally:
        made.far.mend()
    owner = made.client.hget(start["key"], "acq")
    gate.touch()
    ended = eventually(lambda: made.notes.all("row", "end")[1:], message="the successor does not end")[0]
    ends = [result.get(timeout=AFTERWARDS) for result in (held, successor_result, third, beside)]
    return Story(cut_off_at, start, successor, ended, owner, ends)


@pytest.mark.invariant("partitioned-host-is-reported")
def test_holder_on_a_partitioned_host_learns_of_the_loss_before_another_one_holds(
    environment: Environment, story: Story
) -> None:
    assert environment.lost(story.start)[0]["at"] < story.successor["at"]


def test_its_ensure_raises_before_another_one_holds_and_never_passes_again(
    environment: Environment, story: Story
) -> None:
    assert environment.notes.first("row", "LockLost", 0)["at"] < story.successor["at"]
    assert environment.notes.all("row", "a lost lease passed") == []


def test_the_other_host_goes_on_with_that_name_after_the_ttl(environment: Environment, story: Story) -> None:
    assert story.successor["node"] == environment.beside.node
    assert story.successor["token"] > story.start["token"]
    assert story.successor["at"] - story.cut_off_at <= TTL + COMEBACK + SLACK


def test_late_release_of_a_partitioned_host_does_not_free_the_next_holders_lock(story: Story) -> None:
    assert story.owner_after_late_release == story.successor["acq"]
    assert story.successor_ended["held"] is True


@pytest.mark.invariant("partitioned-host-is-reported")
def test_no_message_of_a_host_that_was_cut_off_is_lost_and_each_runs_once(
    environment: Environment, story: Story
) -> None:
    assert story.ends == [False, True, True, True]
    assert [len(environment.notes.all(row, "start")) for row in ("another", "third")] == [1, 1]
