"""The check of the workers' versions."""

from __future__ import annotations

import pytest

from celery_dlock.control import WorkerView
from celery_dlock.control.workers import Workers
from celery_dlock.reports.checks import version_check

OLD, NEW = WorkerView("a", "0.1.0"), WorkerView("b", "0.2.0")
NEWER_WIRE = WorkerView("c", "0.3.0", wire=2)


@pytest.mark.parametrize(
    ("workers", "found", "problem"),
    [
        ([OLD, OLD], "0.1.0 on 2", False),
        ([OLD, NEW, OLD], "0.1.0 on 2; 0.2.0 on 1", False),
        ([WorkerView("d", problem="it does not know the command")], "no worker told its version", False),
        (
            [NEWER_WIRE, OLD],
            "0.1.0 on 1; 0.3.0 on 1; wire versions 1 to 2: end the upgrade, or messages of the newer ones wait",
            True,
        ),
    ],
)
def test_only_a_mix_of_wire_versions_is_a_problem(
    workers: list[WorkerView], found: str, problem: bool
) -> None:  # a value of the table
    check = version_check(Workers(workers))
    assert (check.found, check.problem) == (found, problem)


def test_workers_that_cannot_be_asked_are_no_problem_of_the_store() -> None:
    check = version_check(Workers((), "the broker did not answer", unreachable=True))
    assert (check.found, check.problem) == ("the broker did not answer", False)
