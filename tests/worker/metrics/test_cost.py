"""The cost of metrics for a task, in steps of the interpreter."""

from benchmarks.steps import Child

COUNTING = {"recorder.py:taken", "recorder.py:released"}


def test_metrics_take_at_most_91_steps_of_a_run(own_server):
    child = Child(own_server())
    off = [child.steps("singleton") for _ in range(5)]
    child.start_metrics()
    on = [child.steps("singleton") for _ in range(5)]
    assert not any(steps.keys() & COUNTING for steps in off)
    # The smallest: now and then, a reply comes in two pieces.
    assert 0 < min(steps.total() for steps in on) - min(steps.total() for steps in off) <= 91
