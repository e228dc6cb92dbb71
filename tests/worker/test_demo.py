"""The demo as a user starts it, with the locks and without, and the judge it ends with."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from example_project.demo import promises
from example_project.demo.databases import DATABASES
from example_project.demo.history import Fact
from example_project.demo.ledgers import LedgerRow, ledger_rows
from example_project.demo.verdict import Evidence, Line, Overlap, overlaps, rows
from tests.support.polling import eventually
from tests.support.processes import ROOT, kill_session, spawn, tail

# One after the other: each is a whole shop, and its promises are in seconds.

DEMO = [sys.executable, "-m", "example_project.demo", "--short"]
LIMIT = 45  # seconds the demo gives itself; the process may need a moment more to come and go


def run_demo(*options: str) -> tuple[int, str]:
    ran = subprocess.run(
        [*DEMO, *options],
        check=False,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT + 60,
    )
    return ran.returncode, ran.stdout


def test_every_promise_holds() -> None:
    code, output = run_demo()
    assert code == 0, output
    assert "every promise held" in output
    # The last row: published, ran, skipped, postponed, held, recognised, overlaps, sent twice, freed in.
    total = re.search(r"^all +(\d+) +(\d+) +(\d+) +(\d+) +1 +1 +0 +0 +0\.\d+ s *$", output, re.MULTILINE)
    assert total, output
    published, ran, skipped, postponed = map(int, total.groups())
    assert published == ran + skipped + 1
    assert skipped > 0, output
    assert postponed > 0, output
    # Published, posted, out of order, lost, posted twice, wrong balance, sent back by the kill.
    ledgers = re.search(r"^all +60 +60 +0 +0 +0 +0 +(\d+) *$", output, re.MULTILINE)
    assert ledgers, output
    assert int(ledgers.group(1)) > 0, output
    parked = re.search(r"(\d+) entries are parked", output)
    assert parked, output
    assert int(parked.group(1)) > 0, output
    assert "\x1b" not in output
    listed, checked, explained = output.split("\n$ celery -A example_project.shop dlock ")[1:]
    assert re.search(r"^shop\.\S+ +used ", listed, re.MULTILINE), listed
    assert re.search(r"^unknown outcomes +ok +0 *$", checked, re.MULTILINE), checked
    assert explained.startswith("explain "), explained
    assert "its result is REVOKED: shop.send_receipt:" in explained, explained
    assert "exit code" not in output


@pytest.mark.servers
@pytest.mark.parametrize("store", list(DATABASES))
def test_every_promise_holds_with_the_locks_in_a_database(store: str) -> None:
    code, output = run_demo("--store", store)
    assert code == 0, output
    assert f"starting {DATABASES[store].name}, which keeps the locks" in output
    assert "every promise held" in output


@pytest.mark.slow
def test_demo_without_locks_fails_and_names_what_broke() -> None:
    code, output = run_demo("--without-locks")
    assert code == 1, output
    assert "PROMISE BROKEN: At most one execution per lock name is in its body." in output
    assert "PROMISE BROKEN: once_per: a send that arrived is not sent again." in output
    assert "PROMISE BROKEN: after_crash: a killed send has an unknown outcome" in output
    assert "PROMISE BROKEN: Every balance builds on the one before it." in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_every_process(number: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    demo = spawn(DEMO, log)
    family: list[psutil.Process] = []
    try:
        eventually(lambda: "publishing" in tail(log), within=60, message="the demo does not come up")
        family += psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        assert demo.wait(30) == 128 + number, tail(log)
    finally:
        kill_session(demo)
        # Wait a little: an ended process exists until its zombie is reaped.
        _, alive = psutil.wait_procs(family, timeout=5)
        for process in alive:
            process.kill()
    assert len(family) > 5  # the server, two workers with their pools, two beats
    assert alive == []


@pytest.mark.slow
def test_a_worker_that_dies_fails_the_demo(tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    demo = spawn(DEMO, log)
    try:
        eventually(lambda: "publishing" in tail(log), within=60, message="the demo does not come up")
        children = psutil.Process(demo.pid).children()
        (worker,) = (child for child in children if "--hostname=worker-a@%h" in child.cmdline())
        worker.kill()
        assert demo.wait(LIMIT) == 2, tail(log)
        assert "ended unexpectedly: worker-a" in tail(log, 200)
    finally:
        kill_session(demo)


def enter(run: str, at: float, pid: int = 1, subject: str = "s") -> Fact:
    return Fact("enter", at, pid, "t", run, subject, run)


def leave(run: str, at: float) -> Fact:
    return Fact("leave", at, 1, "t", run, "s", run)


class TestOverlaps:
    def test_one_after_the_other_is_none(self) -> None:
        assert overlaps([enter("a", 1), leave("a", 2), enter("b", 2), leave("b", 3)], {}) == []

    def test_one_inside_another_is_one(self) -> None:
        found = overlaps([enter("a", 1), enter("b", 2), leave("b", 3), leave("a", 9)], {})
        assert found == [Overlap("t", "s", 1)]

    def test_a_short_one_does_not_hide_a_long_one(self) -> None:
        facts = [enter("a", 1), enter("b", 2), leave("b", 3), enter("c", 4), leave("c", 5), leave("a", 9)]
        assert len(overlaps(facts, {})) == 2

    def test_subjects_do_not_disturb_each_other(self) -> None:
        assert overlaps([enter("a", 1), enter("b", 2, subject="other"), leave("a", 3)], {}) == []

    def test_a_killed_body_ends_with_its_process(self) -> None:
        killed = {7: 2.0}
        assert overlaps([enter("a", 1, pid=7), enter("b", 2.1), leave("b", 3)], killed) == []
        assert len(overlaps([enter("a", 1, pid=7), enter("b", 1.9), leave("b", 3)], killed)) == 1

    def test_a_body_without_an_end_is_still_inside(self) -> None:
        assert len(overlaps([enter("a", 1), enter("b", 99), leave("b", 100)], {})) == 1


def evidence(state: str, *, received: int = 1, free_after: float = 0.1) -> Evidence:
    """One receipt, published and delivered, with one body."""
    task, at = "shop.send_receipt", iter(range(100))
    facts = [Fact(what, next(at), 1, task, "id", "R-1", "run") for what in ("publish", "deliver", "enter", "leave")]
    return Evidence(facts, {"id": state}, {task: {"R-1": received}}, {}, {task: free_after})


def crashed(task: str, *, held: bool = False, recognised: int = 0, received: int = 1) -> Evidence:
    """A send whose process (7) was killed, and a second call for it."""
    facts = [Fact("publish", 1, 1, task, "first", "X"), Fact("enter", 2, 7, task, "first", "X", "run")]
    facts += [Fact("publish", 3, 1, task, "second", "X"), Fact("deliver", 4, 8, task, "second", "X")]
    states = {"first": "FAILURE", "second": "FAILURE" if held else "REVOKED"}
    return Evidence(facts, states, {task: {"X": received}}, {7: 2.5}, recognised={task: recognised})


class TestPromises:
    def test_a_good_end_breaks_none(self) -> None:
        good = evidence("SUCCESS")
        unproven = (promises.renewed, promises.crashes_send_nothing_twice)
        judged = [promise for promise in promises.ALL if promise not in unproven]
        assert [fault for promise in judged for fault in promise(good)] == []
        (row,) = rows(good)
        assert (row.published, row.ran, row.skipped, row.postponed, row.sent_twice) == (1, 1, 0, 0, 0)

    def test_a_second_mail_breaks_once_per(self) -> None:
        assert list(promises.sent_once(evidence("SUCCESS", received=2)))

    @pytest.mark.parametrize("state", ["PENDING", "STARTED", "RETRY"])
    def test_a_result_without_an_end_is_lost(self, state: str) -> None:
        assert list(promises.nothing_lost(evidence(state)))

    def test_a_mail_that_never_came_is_lost(self) -> None:
        assert list(promises.nothing_lost(evidence("SUCCESS", received=0)))

    def test_a_key_that_waited_for_more_than_a_second_was_not_freed_at_once(self) -> None:
        assert list(promises.freed_at_once(evidence("SUCCESS", free_after=1.1)))

    def test_a_failure_without_a_kill_is_no_good_end(self) -> None:
        assert list(promises.all_ended_well(evidence("FAILURE")))

    def test_a_held_call_is_no_bad_end_where_a_body_of_its_subject_was_killed(self) -> None:
        held = crashed("shop.send_receipt", held=True)
        assert not list(promises.all_ended_well(held))
        held.killed = {}
        assert list(promises.all_ended_well(held))

    def test_killed_send_that_is_requested_again_is_held_or_recognized(self) -> None:
        assert not list(promises.crashes_send_nothing_twice(crashed("shop.send_receipt", held=True)))
        assert not list(promises.crashes_send_nothing_twice(crashed("shop.send_sms", recognised=1)))

    @pytest.mark.parametrize(
        "unproven",
        [
            lambda: crashed("shop.send_receipt", held=False),
            lambda: crashed("shop.send_sms", recognised=0),
            lambda: crashed("shop.send_sms", recognised=1, received=0),
        ],
        ids=["not held", "not recognised", "killed before it arrived"],
    )
    def test_else_it_proves_nothing(self, unproven: Callable[[], Evidence]) -> None:
        assert list(promises.crashes_send_nothing_twice(unproven()))

    def test_report_past_its_ttl_without_another_request_proves_nothing(self) -> None:
        task = "shop.nightly_report"
        body = [Fact("enter", 10.0, 1, task, "a", "", "a"), Fact("leave", 15.0, 1, task, "a", "", "a")]
        early, late = Fact("deliver", 11.0, 2, task, "b"), Fact("deliver", 13.0, 2, task, "b")
        assert list(promises.renewed(Evidence([*body, early], {}, {})))
        assert not list(promises.renewed(Evidence([*body, late], {}, {})))

    def test_a_failure_is_excused_only_where_that_very_body_was_killed(self) -> None:
        failed = evidence("FAILURE")
        assert list(promises.all_ended_well(Evidence(failed.facts, failed.states, {}, killed={2: 9.0})))
        assert not list(promises.all_ended_well(Evidence(failed.facts, failed.states, {}, killed={1: 9.0})))


def ledger(*lines: tuple[int, int], sent_back: int | None = None, posted: bool = False) -> Evidence:
    """Three entries of one account, of 1, 2 and 3; process 7 was killed, and perhaps had one of them in its hands."""
    facts = [Fact("publish", at, 1, "shop.post_entry", f"id-{at}", "ann") for at in (1, 2, 3)]
    for task_id in ("id-1", "id-2", "id-3"):
        facts.append(Fact("receive", 4, 7, "shop.post_entry", task_id, "ann"))
        if task_id != f"id-{sent_back}":
            facts.append(Fact("part", 5, 7, "shop.post_entry", task_id, "ann"))
    # Another worker posts the first one at that moment, unless it was already `posted`.
    facts.append(Fact("enter", 4, 8, "shop.post_entry", "id-1", "ann", "run"))
    if posted:
        facts.append(Fact("leave", 5, 8, "shop.post_entry", "id-1", "ann", "run"))
    return Evidence(facts, {}, {}, {7: 6.0}, {}, {"ann": [Line(*line) for line in lines]})


class TestLedgers:
    """Published, posted, out of order, lost, posted twice, wrong balance, sent back."""

    @pytest.mark.parametrize(
        ("found", "figures"),
        [
            (ledger((1, 1), (2, 3), (3, 6)), (3, 3, 0, 0, 0, 0, 0)),
            (ledger((2, 2), (1, 3), (3, 6)), (3, 3, 1, 0, 0, 0, 0)),
            (ledger((2, 2), (1, 3), (3, 6), sent_back=1), (3, 3, 0, 0, 0, 0, 1)),
            (ledger((2, 2), (1, 3), (3, 6), sent_back=3), (3, 3, 1, 0, 0, 0, 1)),
            (ledger((1, 1), (3, 4), (2, 6)), (3, 3, 1, 0, 0, 0, 0)),
            (ledger((1, 1), (3, 4), (2, 6), posted=True), (3, 3, 0, 0, 0, 0, 0)),
            (ledger((2, 2), (1, 3), (3, 6), posted=True), (3, 3, 1, 0, 0, 0, 0)),
            (ledger((1, 1), (3, 4)), (3, 2, 0, 1, 0, 0, 0)),
            (ledger((1, 1), (3, 4), sent_back=2), (3, 2, 0, 1, 0, 0, 1)),
            (ledger((1, 1), (2, 3), (2, 5), (3, 8)), (3, 3, 0, 0, 1, 0, 0)),
            (ledger((1, 1), (2, 3), (2, 5), (3, 8), sent_back=2), (3, 3, 0, 0, 0, 0, 1)),
            (ledger((1, 1), (2, 2), (3, 5)), (3, 3, 0, 0, 0, 1, 0)),
        ],
        ids=[
            "good",
            "out of order",
            "late because the kill sent it back",
            "late, and another was sent back",
            "late while another was being posted",
            "late because it was on its way to the killed worker",
            "late although it was posted before",
            "lost",
            "lost although it was sent back",
            "twice",
            "twice because the kill sent it back",
            "one balance did not see the entry before",
        ],
    )
    def test_every_fault_is_counted_once(self, found: Evidence, figures: tuple[int, ...]) -> None:
        assert ledger_rows(found) == [LedgerRow("ann", *figures)]

    @pytest.mark.parametrize(
        ("promise", "bad"),
        [
            (promises.posted_in_order, ledger((2, 2), (1, 3), (3, 6))),
            (promises.posted_once, ledger((1, 1), (3, 4))),
            (promises.posted_once, ledger((1, 1), (2, 3), (2, 5), (3, 8))),
            (promises.balances_right, ledger((1, 1), (2, 2), (3, 5))),
        ],
    )
    def test_a_fault_breaks_its_promise(self, promise: promises.Promise, bad: Evidence) -> None:
        assert list(promise(bad))
        assert not list(promise(ledger((1, 1), (2, 3), (3, 6))))


IN_A_FINALISER = """
import os, signal, sys, time
from example_project.demo.__main__ import _strike_again
for number in (signal.SIGTERM, signal.SIGALRM):
    signal.signal(number, lambda *_: sys.exit(143))
sys.unraisablehook = _strike_again
class Result:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
result = Result()
del result
for _ in range(100):
    time.sleep(0.1)  # not pause(): it would miss a signal that strikes just before it
"""


def test_an_interruption_that_a_finaliser_swallows_strikes_again():
    ended = subprocess.run([sys.executable, "-c", IN_A_FINALISER], cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == 143
