"""The cost of a death at each step of a hand-off, by how the messages are acknowledged; and it costs no more.

1 holds the lock, 2 and 3 wait for it, and a process dies. `tests/worker/queue/test_queue_kills.py` has the deaths of
a child under late acknowledgement.
"""

import time
from typing import NamedTuple

import pytest

from celery_dlock.locking.watchdog import FREED_WITHIN
from celery_dlock.store.model import AcquireRequest, Requester
from tests.conftest import WORKERS
from tests.support.environments.queue_faults import accounts, queue_fault_environment
from tests.support.polling import eventually
from tests.support.processes import session_of
from tests.support.servers import Server
from tests.support.workers import Urls


class Death(NamedTuple):
    """At which step who dies, and what then comes of the three.

    Args:
        arm: before which message is sent the step is armed; 0: when 2 and 3 wait.
        ran: how often each of the three came to the end of its body.
        entered: how often it began it, where that is not the same.
        back: who is sent back by it, so that others may go first.
        perhaps: the call that may have run once more than that; 0: none.
    """

    step: str
    whom: str
    arm: int = 0
    ran: tuple[int, int, int] = (1, 1, 1)
    entered: tuple[int, int, int] | None = None
    back: tuple[int, ...] = ()
    perhaps: int = 0


LATE = [
    # Delivered again, and run a second time.
    Death("body", "worker", entered=(2, 1, 1), back=(1,)),
    Death("publish:after", "worker", ran=(2, 1, 1), back=(1,)),
    # Its grant passes before the broker delivers it again.
    Death("received:before", "worker", back=(2,)),
    Death("take:before", "worker", back=(2,)),
    Death("park:before", "worker", arm=2, back=(2,)),
]
EARLY = [
    # In its body, it is acknowledged: lost.
    Death("body", "worker", ran=(0, 1, 1), entered=(1, 1, 1)),
    # In its body, and not yet.
    Death("acknowledge:before", "worker", arm=1, entered=(2, 1, 1), back=(1,)),
    # Parked, and not yet acknowledged.
    Death("acknowledge:before", "worker", arm=2),
    Death("park:before", "worker", arm=2, back=(2,)),
    Death("park:after", "worker", arm=2),
    Death("release:before", "worker"),
    Death("release:after", "worker"),
    Death("published:before", "worker"),
    Death("received:before", "worker", back=(2,)),
    Death("take:before", "worker", back=(2,)),
    # A child's: Celery ends the message as FAILURE.
    Death("body", "child", ran=(0, 1, 1), entered=(1, 1, 1)),
    Death("release:before", "child"),
    Death("release:after", "child"),
    Death("published:before", "child"),
    Death("park:before", "child", arm=2, ran=(1, 0, 1)),
    Death("take:after", "child", ran=(1, 0, 1)),
    # ... also one that is parked already. It runs all the same if it is granted the lock before Celery sees the death.
    Death("park:after", "child", arm=2, ran=(1, 0, 1), perhaps=2),
    # Celery sees the death at once, or after 5 s: then its copy has come, and run, before the FAILURE is stored.
    Death("take:before", "child", ran=(1, 0, 1), perhaps=2, back=(2,)),
]
#: Seconds after which an unpublished grant is published: it is due after 5, and a sweep comes by every 2.
SWEPT_WITHIN = 7.0
#: A loaded machine's.
SLACK = 3.0


def told(death):
    return f"{death.whom}-{death.step}" + (f"-of-{death.arm}" if death.arm else "")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    with (
        Server(folder / "server") as server,
        queue_fault_environment(folder, Urls(server.url(0), server.url(1), server.url(2))) as environment,
    ):
        yield environment


@pytest.fixture
def environment(made, request):
    made.two_workers()
    request.node.stash[WORKERS] = list(made.workers)
    yield made
    for key in made.notes.keys("gate:*") + made.notes.keys("kill:*"):
        made.notes.delete(key)


def hand_over_with(environment, task, death):
    """Returns the account, and the pids of the dead."""
    account = next(accounts)
    if death.arm == 1:
        environment.arm(death.step, death.whom)
    environment.hold(task, account)
    if task is environment.tasks.early and death.arm != 1:
        acknowledged(environment)
    if death.arm == 2:
        environment.arm(death.step, death.whom)
        with environment.only_another_than_the_holder_receives(account):
            task.delay(account, 2)
            killed_at(environment, death)
        task.delay(account, 3)
        parked = 2 if death.ran[1] else 1
        eventually(lambda: environment.count(task, account) == parked, 20, message="2 and 3 do not wait")
    elif death.arm == 1:
        killed_at(environment, death)
        task.delay(account, 2)
        task.delay(account, 3)
    else:
        environment.park(task, account, 2, 3)
        environment.arm(death.step, death.whom)
    environment.open_gate(account)
    return account, finished(environment, task, account, death)


def killed_at(environment, death):
    eventually(lambda: environment.notes.exists(f"killed:{death.step}"), 20, message=f"nobody came by {death.step}")
    if death.whom == "worker":
        # Kombu takes a message off its list before it notes it as unacknowledged: one sent to a dying worker is lost.
        eventually(lambda: not all(worker.running for worker in environment.workers), 10)


def finished(environment, task, account, death):
    def ran():
        numbers = environment.numbers(account, "out")
        return all(numbers.count(number) >= times for number, times in enumerate(death.ran, 1))

    eventually(ran, 40, message=f"not {death.ran} ran")
    environment.wait_until_drained(task, account)
    return environment.dead(death.step)


def acknowledged(environment):
    with environment.tasks.app.connection_for_write() as connection:
        client = connection.default_channel.client
        eventually(lambda: not client.hlen("unacked"), 10, message="the holder is not acknowledged")


def as_it_should(environment, account, dead, death):
    ran, text = environment.runs(account), f"{environment.runs(account)}, dead {dead}"
    for what, expected in (("in", death.entered or death.ran), ("out", death.ran)):
        numbers = environment.numbers(account, what)
        counts = [numbers.count(number) for number in (1, 2, 3)]
        if death.perhaps and counts[death.perhaps - 1] == expected[death.perhaps - 1] + 1:
            counts[death.perhaps - 1] -= 1
        assert tuple(counts) == expected, f"{what}: {text}"
    assert environment.overlaps(account, dead) == [], text
    order = [number for word, number, _ in ran if word == "in" and number not in death.back]
    assert order == sorted(order), text


@pytest.mark.invariant("queue-survives-faults")
@pytest.mark.parametrize("death", LATE, ids=told)
def test_acknowledged_late_a_worker_that_dies_costs_no_message(environment, death):
    as_it_should(environment, *hand_over_with(environment, environment.tasks.late, death), death)


@pytest.mark.invariant("queue-survives-faults")
@pytest.mark.parametrize("death", EARLY, ids=told)
def test_acknowledged_early_a_death_costs_the_message_in_its_body_and_no_other(environment, death):
    as_it_should(environment, *hand_over_with(environment, environment.tasks.early, death), death)


@pytest.mark.parametrize("step", ["sweep:after", "published:before"])
def test_a_sweeper_dies_between_its_grant_and_its_publication(environment, step):
    """A holder is gone, its lease ends, and the worker that grants the next dies: the other one publishes it."""
    task, account = environment.tasks.late, next(accounts)
    abandon_a_lock(task, account, ttl_ms=2500)
    environment.close_gate(account)
    environment.park(task, account, 1, 2, 3)
    environment.arm(step, "worker")
    eventually(lambda: environment.notes.exists(f"killed:{step}"), 15, message="nobody swept it")
    died = time.monotonic()
    eventually(lambda: environment.numbers(account, "in")[:1] == [1], SWEPT_WITHIN + SLACK)
    assert time.monotonic() - died <= SWEPT_WITHIN + SLACK
    # Until its last process is gone, the broker may give the dead worker the copy of 2, which then loses its grant.
    eventually(lambda: not any(session_of(worker.pid) for worker in environment.began if not worker.running))
    environment.open_gate(account)
    eventually(lambda: environment.numbers(account, "out") == [1, 2, 3], 10)
    environment.wait_until_drained(task, account)
    assert environment.dead(step)
    assert environment.numbers(account, "in") == [1, 2, 3]


def test_a_releaser_dies_before_it_publishes_and_a_sweep_does_within_seven_seconds(environment):
    task, account = environment.tasks.late, next(accounts)
    environment.hold(task, account)
    environment.park(task, account, 2)
    environment.arm("publish:before", "worker")
    environment.open_gate(account)
    eventually(lambda: environment.notes.exists("killed:publish:before"), 10)
    died = time.monotonic()
    eventually(lambda: 2 in environment.numbers(account, "in"), SWEPT_WITHIN + SLACK)
    assert time.monotonic() - died <= SWEPT_WITHIN + SLACK
    environment.wait_until_drained(task, account)
    environment.dead("publish:before")


def test_a_child_that_holds_dies_and_the_next_one_starts_within_a_second(environment):
    task, account = environment.tasks.early, next(accounts)
    environment.hold(task, account)
    environment.park(task, account, 2)
    environment.arm("body", "child")
    died = time.monotonic()
    environment.open_gate(account)
    eventually(lambda: 2 in environment.numbers(account, "in"), FREED_WITHIN + SLACK)
    # The time to see it, and a delivery.
    assert time.monotonic() - died <= FREED_WITHIN + SLACK
    environment.wait_until_drained(task, account)
    environment.dead("body")


def abandon_a_lock(task, account, ttl_ms):
    """A process that is gone held it."""
    name = task.lock_spec.name_of((account, 0), {})
    task.dlock.open_store(1.0).acquire(
        name, f"{account}.1", ttl_ms, AcquireRequest(Requester.of(None, None, "gone", 1))
    )
