"""A short run of `make chaos STORE=...` for each kind of store; and the judge of it, on histories written by hand."""

import pytest

from chaos.failovers.__main__ import WAYS, plan
from chaos.failovers.checker import TTL, judge
from chaos.failovers.run import Failover, Plan, Record, run
from chaos.failovers.table import HEAD, figures, table
from chaos.failovers.topologies import STANDS

SHORT = {"failovers": 1, "workers": 1, "settle": 1.0, "names": 6, "rate": 6.0, "longest": 3.5}


@pytest.mark.invariant("killed-server-grants-nothing-twice")
@pytest.mark.parametrize(
    ("store", "way"),
    [("sentinel", "replicas"), pytest.param("cluster", "replicas", marks=pytest.mark.slow), ("redlock3", "no delay")],
)
def test_a_server_is_killed_under_load_and_nothing_is_granted_twice_or_lost(tmp_path, store, way):
    record = run(plan(store, way, **SHORT), tmp_path)
    found = judge(record)
    assert found.broken == [], table([(way, record, found)])
    assert (found.not_told, found.told_inside, found.lost) == (0, 0, 0)
    # ... and it was a run worth its name.
    assert len(record.failovers) == 1
    assert found.executions >= 10


@pytest.mark.invariant("killed-server-grants-nothing-twice")
def test_store_that_restarts_empty_grants_twice_and_fencing_refuses_the_late_write(tmp_path):
    record = run(plan("standalone", "primary", **SHORT | {"names": 2}), tmp_path)
    found = judge(record)
    assert found.broken == []
    assert found.double_grants >= 1
    assert (found.let_through, found.lost) == (0, 0)


def test_every_store_has_its_ways_and_no_other_has():
    assert set(WAYS) == set(STANDS)


# -- the judge


def _ran(run_id, token, start, end, told=None, name="n", main=1):
    facts = {"id": f"id-{run_id}", "task": "failovers.retries", "name": name, "token": token, "pid": 9, "main": main}
    events = [(start, {"what": "sent", **facts}), (start, {"what": "in", "run": run_id, **facts})]
    if told is not None:
        events.append((told, {"what": "told", "run": run_id}))
    return [*events, (end, {"what": "out", "run": run_id, "how": "return"})]


def _judged(*runs, forgets=True, failovers=(), landed=(), more=(), declared=None):
    timed = sorted([event for run in runs for event in run] + list(more), key=lambda pair: pair[0])
    events = [{"at": int(at * 1e9), **event} for at, event in timed]
    made = Plan("sentinel", declared or {}, forgets)
    struck = [Failover("kill", cut=False, at=at, until=until, resumed=1.0) for at, until in failovers]
    return judge(Record(made, events=events, landed=list(landed), failovers=struck))


EARLIER, LATER = _ran("a", 1, 10.0, 15.0), _ran("b", 2, 12.0, 16.0)
TOLD_LATE, TOLD_FIRST = _ran("a", 1, 10.0, 15.0, told=13.0), _ran("a", 1, 10.0, 15.0, told=11.5)
FAILED_OVER = [(11.0, 14.0)]


def test_an_overlap_that_no_failover_explains_breaks_the_promise():
    found = _judged(EARLIER, LATER)
    assert found.broken[0].startswith("an overlap without a failover")
    assert (found.double_grants, found.not_told) == (1, 1)


def test_a_failover_that_may_forget_explains_it_and_it_is_counted_as_not_told():
    found = _judged(EARLIER, LATER, failovers=FAILED_OVER)
    assert (found.broken, found.not_told, found.told_inside) == ([], 1, 0)


def test_one_that_was_told_while_inside_and_one_that_was_told_before_are_told_apart():
    late, first = (_judged(earlier, LATER, failovers=FAILED_OVER) for earlier in (TOLD_LATE, TOLD_FIRST))
    assert (late.told_before, late.told_inside, late.not_told) == (0, 1, 0)
    assert (first.told_before, first.told_inside, first.not_told) == (1, 0, 0)


@pytest.mark.parametrize("earlier", [EARLIER, TOLD_LATE])
def test_where_more_was_declared_the_same_overlap_breaks_the_promise(earlier):
    found = _judged(earlier, LATER, failovers=FAILED_OVER, forgets=False)
    assert found.broken[0].startswith("a double grant in spite of")


def test_but_not_if_the_holder_was_told_first_or_was_not_scheduled():
    assert _judged(TOLD_FIRST, LATER, failovers=FAILED_OVER, forgets=False).broken == []
    gap = (11.9, {"what": "gap", "main": 1, "since": int((11.8 - TTL / 2) * 1e9)})
    earlier = _ran("a", 1, 5.0, 15.0)
    found = _judged(earlier, LATER, failovers=FAILED_OVER, forgets=False, more=[gap])
    assert (found.broken, found.paused) == ([], 1)


def test_loss_unreported_for_a_ttl_breaks_the_promise_for_every_declaration():
    found = _judged(_ran("a", 1, 10.0, 30.0), _ran("b", 2, 12.0, 13.0), failovers=FAILED_OVER)
    assert found.broken[0].startswith("a holder was not notified within its ttl")


def test_an_older_token_that_lands_behind_a_newer_breaks_the_promise():
    found = _judged(EARLIER, landed=[("n", 2, "id-b"), ("n", 1, "id-a")])
    assert (found.let_through, len(found.broken)) == (1, 1)


@pytest.mark.parametrize(
    ("task", "declared", "counts"),
    [
        ("retries", None, (1, 0)),
        ("queues", None, (0, 1)),
        ("queues", {"dlock_durability": {"replicas": 1}}, (1, 0)),
    ],
)
def test_message_without_an_end_is_lost_unless_it_waited_in_a_store_that_may_forget(task, declared, counts):
    sent = (10.0, {"what": "sent", "id": "x", "task": f"failovers.{task}", "name": "n"})
    found = _judged(more=[sent], failovers=FAILED_OVER, forgets=declared is None, declared=declared)
    assert (found.lost, found.lost_in_store) == counts
    assert len(found.broken) == counts[0]


def test_the_table_and_the_figures_name_every_count():
    record = Record(Plan("cluster", {}, forgets=True), failovers=[Failover("stop", cut=True, at=1, until=2, resumed=3)])
    lines = table([("primary", record, judge(record))]).splitlines()
    assert all(head in lines[0] for head in HEAD)
    assert lines[1].split()[:3] == ["cluster", "primary", "1"]
    assert figures("primary", record, judge(record))["each"] == [{"how": "stop", "cut_off": True, "grants_again": 3}]
