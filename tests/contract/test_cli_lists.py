"""The lists of the command line in a pipe: their column names, and what they say if they are cut."""
# ruff: noqa: F811 - the fixture `run` is imported

import pytest

from celery_dlock.store.redis.store import RedisStore
from tests.contract import queue_helpers as queue
from tests.contract.test_cli import Run, lines, module, rows, run  # noqa: F401  # fixtures are found by being here
from tests.contract.test_control_reads import bury, every_state, grant, name

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("list",), "NAME STATE TASK TASK_ID WORKER SINCE TIME_LEFT TOKEN WAITERS"),
        (("claims",), "NAME TASK TASK_ID PUBLISHER SINCE TIME_LEFT"),
        (("unknown",), "NAME IDEMPOTENCY_KEY TASK TASK_ID WORKER STARTED TICK MARK"),
        (("dead",), "NAME ID TASK SINCE"),
        (("queue",), "NAME POSITION STATE TASK TASK_ID SINCE DUE WAITING_TIME"),
        (("check",), "CHECK RESULT FOUND"),
        (("audit",), "AT USER NAME ACTION REASON"),
    ],
)
def test_lists_in_a_pipe_begin_with_their_column_names_unless_not_wanted(
    store: RedisStore, run: Run, words: tuple[str, ...], names: str
) -> None:
    every_state(store)
    bury(store, "b")
    queue.park(store, "w.1", "w", name("g"))
    run("hold", name("hh").text, "--for", "1m", "--reason", "why")
    found = lines(run(*words))
    assert found[0] == [one.replace("_", " ") for one in names.split()]
    plain = lines(run(*words, "--no-headers"))
    assert len(plain) == len(found) - 1 > 0
    assert found[0] not in plain


@pytest.mark.parametrize("words", [("list",), ("claims",), ("unknown",), ("dead",), ("queue",), ("audit",)])
def test_empty_list_prints_no_column_names(run: Run, words: tuple[str, ...]) -> None:
    assert run(*words).stdout == ""


def test_list_of_waiters_says_that_it_is_cut(store: RedisStore, run: Run) -> None:
    grant(store, "g", "w")
    cut = run("queue", "--limit", "1")
    assert (len(rows(cut)), "--limit" in cut.stderr) == (1, True)
    assert "--limit" not in run("queue").stderr
