"""The queue policy at work: short runs of `python -m tests.worker.queue.queue_run`."""

import pytest

from tests.worker.queue.queue_run import measure


@pytest.mark.invariant("grants-survive-deaths")
@pytest.mark.parametrize(
    ("messages", "names", "kills"), [(300, 15, 2), pytest.param(1000, 50, 4, marks=pytest.mark.slow)]
)
def test_every_message_runs_alone_and_only_the_killed_run_twice(messages, names, kills):
    found = measure(messages=messages, names=names, kills=kills, workers=2, seed=1)
    assert found.ran + found.never_noted == found.messages, found
    assert (found.overlaps, found.twice_alive) == (0, 0), found
    assert found.children_killed + found.workers_killed == kills, found


@pytest.mark.invariant("rank-follows-receipt")
def test_one_worker_without_kills_runs_each_name_in_the_order_of_receipt():
    found = measure(messages=150, names=5, kills=0, workers=1, seed=1)
    assert (found.ran, found.twice, found.overlaps, found.out_of_order) == (150, 0, 0, 0), found
