"""The checker of `make chaos`, on histories written by hand: what it calls broken, and what it excuses."""

import itertools

import pytest

from chaos.checker import check, too_late
from chaos.schedule import KINDS, schedule
from chaos.timeline import Story

TTL = 2.0


class Tale:
    """A history by hand; times in seconds."""

    def __init__(self):
        self.events, self.numbers = [], itertools.count()
        self.landed, self.ends, self.waiting, self.trails, self.overwritten = [], {}, {}, {}, {}
        self.never_recorded = set()

    def note(self, at, what, **facts):
        self.events.append({"at": round(at * 1e9), "what": what, **facts})

    def run(self, start, end, token, task_id=None, name="n", pid=11, main=1, how="return", task="chaos.skips"):
        run = f"r{next(self.numbers)}"
        self.note(start, "in", run=run, id=task_id or run, task=task, name=name, token=token, pid=pid, main=main)
        if end is not None:
            self.note(end, "out", run=run, how=how)
        return run

    def fault(self, start, end, kind, **facts):
        number = next(self.numbers)
        self.note(start, "fault", kind=kind, target=KINDS[kind].target, number=number, lasts=end - start, **facts)
        self.note(end, "over", number=number)

    def kill(self, at, pids, main=1, log="w"):
        number = next(self.numbers)
        facts = {"number": number, "pids": pids, "main": main, "log": log}
        self.note(at, "fault", kind="kill main", target="worker", deadly=True, **facts)

    def sent(self, task_id="t", task="chaos.skips", began=0):
        self.note(0, "sent", id=task_id, task=task, name="n", began=round(began * 1e9))

    def found(self):
        story = Story.of(sorted(self.events, key=lambda event: event["at"]))
        return check(
            story, self.landed, self.ends, self.waiting, self.trails, TTL, self.overwritten, self.never_recorded
        )


@pytest.fixture
def tale():
    return Tale()


def words(broken):
    return [line.split(":")[0] for line in broken]


class TestOverlaps:
    def test_two_bodies_of_one_name_at_one_time_are_an_overlap(self, tale):
        tale.run(1, 4, token=1)
        tale.run(3, 5, token=2, pid=12)
        assert words(tale.found().broken) == ["overlap, no fault"]

    @pytest.mark.parametrize(("start", "name"), [(4.1, "n"), (3, "other")])
    def test_bodies_one_after_the_other_or_of_two_names_are_none(self, tale, start, name):
        tale.run(1, 4, token=1)
        tale.run(start, 5, token=2, name=name)
        assert (tale.found().overlaps.total(), tale.found().broken) == (0, [])

    def test_a_body_whose_process_was_killed_has_ended(self, tale):
        tale.run(1, None, token=1)
        tale.kill(2, [1, 11])
        tale.run(3, 5, token=2, pid=22, main=2)
        assert tale.found().broken == []

    def test_run_that_began_in_the_moment_of_the_kill_is_excused(self, tale):
        tale.kill(2, [1, 11])
        tale.run(2.1, None, token=1)
        tale.note(2.5, "gone", pid=11, seen=round(1e9))
        tale.run(3, 5, token=2, pid=22, main=2)
        assert tale.found().broken == []

    def test_one_whose_process_was_gone_before_it_began_has_not(self, tale):
        tale.note(0.5, "gone", pid=11, seen=0)
        tale.run(1, None, token=1)
        tale.run(3, 5, token=2, pid=22, main=2)
        assert words(tale.found().broken) == ["overlap, no fault"]

    def test_one_whose_process_was_never_seen_dead_has_not(self, tale):
        tale.run(1, None, token=1)
        tale.run(3, 5, token=2, pid=22, main=2)
        assert words(tale.found().broken) == ["overlap, no fault"]

    @pytest.mark.parametrize(
        ("pause", "main", "expected"),
        [((2, 5), 1, []), ((2, 2.5), 1, ["overlap, no fault"]), ((2, 5), 2, ["overlap, no fault"])],
        ids=["for longer than its lease", "for a moment", "another worker"],
    )
    def test_a_holder_that_was_paused_is_excused(self, tale, pause, main, expected):
        tale.run(1, 6, token=1)
        tale.fault(*pause, "pause worker, long", pids=[main, 11], main=main)
        tale.run(4.5, 5.5, token=2, pid=22, main=2)
        assert words(tale.found().broken) == expected

    def test_a_paused_child_is_no_excuse_because_its_worker_renews(self, tale):
        tale.run(1, 6, token=1)
        tale.fault(2, 5, "pause child, long", pids=[11], main=1)
        tale.run(4.5, 5.5, token=2, pid=22, main=2)
        assert words(tale.found().broken) == ["overlap, no fault"]

    def test_unless_it_was_paused_between_its_lock_and_its_first_step(self, tale):
        tale.run(5.1, 6, token=1)
        tale.fault(2, 5, "pause child, long", pids=[11], main=1)
        tale.run(4.5, 5.5, token=2, pid=22, main=2)
        assert tale.found().broken == []

    @pytest.mark.parametrize(("told", "expected"), [(3.5, []), (4.6, ["overlap, store away, holder NOT notified"])])
    def test_holder_must_have_learned_of_its_loss_while_the_store_is_away(self, tale, told, expected):
        earlier = tale.run(1, 6, token=1)
        tale.fault(2, 4.4, "pause store, long")
        tale.note(told, "told", run=earlier)
        tale.run(4.5, 5.5, token=2, pid=22, main=2)
        assert words(tale.found().broken) == expected

    @pytest.mark.parametrize(("end", "expected"), [(4.6, []), (6, ["overlap, store away, holder NOT aborted"])])
    def test_and_one_that_is_to_be_aborted_must_be_out(self, tale, end, expected):
        earlier = tale.run(1, end, token=1, task="chaos.aborts")
        tale.fault(2, 4.4, "pause store, long")
        tale.note(3.5, "told", run=earlier)
        tale.run(4.5, 5.5, token=2, pid=22, main=2)
        assert words(tale.found().broken) == expected

    @pytest.mark.parametrize(("resumed", "expected"), [(5, []), (4, ["overlap, store away, holder NOT notified"])])
    def test_stopped_holder_could_not_learn_of_its_loss(self, tale, resumed, expected):
        tale.run(1, 6, token=1)
        tale.fault(2, 4.4, "pause store, long")
        tale.fault(3, resumed, "pause child, long", pids=[11], main=1)
        tale.run(4.5, 5.5, token=2, pid=22, main=2)
        assert words(tale.found().broken) == expected

    def test_one_that_asks_and_gets_no_yes_counts_as_told_from_when_it_asked(self, tale):
        earlier = tale.run(1, 6, token=1)
        tale.fault(2, 4.4, "pause store, long")
        tale.note(5, "ensure", run=earlier, ok=False, asked=int(2e9))
        tale.run(4.5, 5.5, token=2, pid=22, main=2)
        assert tale.found().broken == []

    def test_a_store_that_was_emptied_excuses_it(self, tale):
        tale.run(1, 6, token=1)
        tale.fault(2, 2, "FLUSHALL")
        tale.run(3, 5, token=2, pid=22, main=2)
        assert tale.found().broken == []
        assert tale.found().overlaps == {"data lost": 1}

    def test_late_holder_must_not_pass_ensure(self, tale):
        earlier = tale.run(1, 6, token=1)
        tale.fault(2, 5, "pause worker, long", pids=[1, 11], main=1)
        tale.run(4.5, 5.8, token=2, pid=22, main=2)
        tale.note(5.6, "ensure", run=earlier, ok=True, asked=int(5.5e9))
        assert words(tale.found().broken) == ["ensure() passed although another was inside"]


class TestFencing:
    def test_a_write_of_an_older_token_after_a_newer_one_breaks_the_promise(self, tale):
        tale.landed = [("n", 1, "a"), ("n", 2, "b"), ("n", 1, "a")]
        assert (tale.found().fenced_overlaps, len(tale.found().broken)) == (1, 1)

    def test_growing_tokens_and_refused_writes_do_not(self, tale):
        tale.landed = [("n", 1, "a"), ("m", 9, "c"), ("n", 2, "b"), ("n", 2, "b")]
        tale.note(3, "write", run=tale.run(1, 4, token=1), ok=False)
        assert (tale.found().fenced_overlaps, tale.found().refused, tale.found().broken) == (0, 1, [])

    def test_a_token_that_was_given_twice_breaks_it(self, tale):
        tale.run(1, 2, token=7)
        tale.run(3, 4, token=7)
        assert tale.found().broken == ["token 7 of n was given 2 times"]


class TestLost:
    def test_a_message_with_neither_end_nor_place_is_lost(self, tale):
        tale.sent()
        assert words(tale.found().broken) == ["lost"]

    @pytest.mark.parametrize("known", ["ends", "waiting"])
    def test_one_that_ended_or_waits_is_not(self, tale, known):
        tale.sent()
        setattr(tale, known, {"t": "SUCCESS"})
        assert (tale.found().lost.total(), tale.found().broken) == (0, [])

    def test_one_that_no_worker_recorded_after_it_took_it_is_excused(self, tale):
        tale.sent()
        tale.never_recorded = {"t"}
        assert tale.found().broken == []
        assert tale.found().lost == {"taken from the broker and not recorded by kombu": 1}

    def test_one_that_was_recorded_is_lost_whatever_struck(self, tale):
        tale.sent()
        tale.kill(2, [1, 11])
        tale.fault(2, 3, "restart broker")
        assert words(tale.found().broken) == ["lost"]

    @pytest.mark.parametrize(
        ("task", "killed", "broken"),
        [("chaos.queues_early", "w", []), ("chaos.queues", "w", ["lost"]), ("chaos.queues_early", "v", ["lost"])],
    )
    def test_one_in_the_hands_of_a_killed_process_only_if_it_was_acknowledged_early(self, tale, task, killed, broken):
        tale.sent(task=task)
        tale.trails = {"t": [("received", 1.9, "w")]}
        tale.kill(2, [1, 11], log=killed)
        assert words(tale.found().broken) == broken

    @pytest.mark.parametrize(("how", "broken"), [("GreenletExit", []), ("SystemExit", ["lost"])])
    def test_one_whose_greenlet_was_killed_is_excused_because_celery_acknowledges_it(self, tale, how, broken):
        tale.sent()
        tale.trails = {"t": [("received", 0.9, "w")]}
        tale.run(1, 2, token=1, task_id="t", how=how)
        assert words(tale.found().broken) == broken

    @pytest.mark.parametrize(("emptied", "broken"), [(3, []), (1, ["lost"])])
    def test_a_parked_one_only_if_the_store_was_emptied_since(self, tale, emptied, broken):
        tale.sent(task="chaos.queues")
        tale.trails = {"t": [("received", 1.9, "w"), ("parked", 2, "w")]}
        tale.fault(emptied, emptied, "FLUSHALL")
        assert words(tale.found().broken) == broken

    def test_a_failure_that_no_body_raised_breaks_the_promise(self, tale):
        tale.sent()
        tale.ends = {"t": "FAILURE StoreUnavailable"}
        assert tale.found().broken == ["chaos.skips t ended FAILURE StoreUnavailable"]


class TestDoubled:
    def test_a_message_whose_body_came_to_its_end_twice_was_done_twice(self, tale):
        tale.run(1, 2, token=1, task_id="t")
        tale.run(8, 9, token=2, task_id="t")
        assert words(tale.found().broken) == ["done twice"]

    def test_a_body_that_died_does_not_count(self, tale):
        tale.run(1, None, token=1, task_id="t")
        tale.kill(1.5, [1, 11])
        tale.run(8, 9, token=2, pid=22, main=2, task_id="t")
        assert (tale.found().doubled.total(), tale.found().broken) == (0, [])

    @pytest.mark.parametrize(
        ("acked", "killed", "broken"),
        [(2.1, 2.1, []), (2.1, 5, ["done twice"]), (5.1, 5, []), (None, 5, [])],
        ids=["at once", "after it", "on a busy machine", "never acknowledged"],
    )
    def test_a_process_that_died_before_the_acknowledgement_excuses_it(self, tale, acked, killed, broken):
        tale.run(1, 2, token=1, task_id="t")
        if acked:
            tale.note(acked, "acked", id="t", main=1)
        tale.kill(killed, [1, 11])
        tale.run(8, 9, token=2, pid=22, main=2, task_id="t")
        assert words(tale.found().broken) == broken

    def test_a_broker_that_was_away_then_excuses_it(self, tale):
        tale.run(1, 2, token=1, task_id="t")
        tale.fault(2.1, 2.2, "broker CLIENT KILL")
        tale.run(3, 4, token=2, task_id="t")
        assert tale.found().doubled == {"the broker was away at the acknowledgement": 1}

    @pytest.mark.parametrize(
        ("paused", "pid", "broken"), [(2.1, 11, []), (2.1, 12, ["done twice"]), (1.2, 11, ["done twice"])]
    )
    def test_pool_child_that_was_paused_before_its_report_excuses_it(self, tale, paused, pid, broken):
        tale.run(1, 2, token=1, task_id="t")
        tale.note(2.5, "acked", id="t", main=1)
        tale.fault(paused, paused + 0.3, "pause child, short", pids=[pid], main=1)
        tale.run(8, 9, token=2, pid=22, main=2, task_id="t")
        assert words(tale.found().broken) == broken


class TestSeats:
    def test_bodies_on_different_seats_of_a_name_may_overlap(self, tale):
        for seat, token in enumerate((5, 3, 4)):
            tale.run(1, 2, token=token, name=f"n/{seat}")
        assert tale.found().broken == []

    def test_two_bodies_on_one_seat_break_the_promise(self, tale):
        tale.run(1, 3, token=1, name="n/2")
        tale.run(2, 4, token=2, name="n/2")
        assert tale.found().broken

    def test_body_on_a_seat_above_the_limit_breaks_the_promise(self, tale):
        tale.run(1, 2, token=1, name="n/3")
        assert words(tale.found().broken) == ["a seat that the limit of 3 does not have"]


class TestDebounced:
    def test_call_that_was_replaced_and_did_not_run_is_counted(self, tale):
        tale.sent(task="chaos.debounces")
        tale.ends = {"t": "REVOKED"}
        assert (tale.found().replaced, tale.found().broken) == (1, [])

    @pytest.mark.parametrize(
        ("start", "broken"), [(2.6, []), (2.4, ["a debounced call started 0.40 s after it was sent"])]
    )
    def test_call_that_starts_before_its_time_breaks_the_promise(self, tale, start, broken):
        tale.sent(task="chaos.debounces", began=2)
        tale.ends = {"t": "SUCCESS"}
        tale.run(start, 3, token=1, task_id="t", task="chaos.debounces")
        assert [line.split(",")[0] for line in tale.found().broken] == broken

    @pytest.mark.parametrize(
        ("first", "end", "broken"),
        [(2.5, "REVOKED", []), (2.9, "REVOKED", ["a debounced"]), (2.5, "SUCCESS", ["a debounced"])],
    )
    def test_call_may_start_at_once_if_its_burst_began_debounce_max_ago(self, tale, first, end, broken):
        tale.sent("older", "chaos.debounces", began=first)
        tale.sent("t", "chaos.debounces", began=4.5)
        tale.ends = {"older": end, "t": "SUCCESS"}
        tale.run(4.6, 5, token=1, task_id="t", task="chaos.debounces")
        assert [" ".join(line.split()[:2]) for line in tale.found().broken] == broken

    @pytest.mark.parametrize("known", ["ends", "overwritten"])
    @pytest.mark.parametrize(("killed", "broken"), [(None, ["done and replaced by a newer call"]), (2.1, [])])
    def test_call_that_ran_and_was_replaced_needs_a_lost_acknowledgement(self, tale, known, killed, broken):
        tale.sent(task="chaos.debounces")
        tale.ends = {"t": "SUCCESS"}
        setattr(tale, known, {"t": "REVOKED"})
        tale.run(1, 2, token=1, task_id="t", task="chaos.debounces")
        if killed:
            tale.kill(killed, [1, 11])
        assert words(tale.found().broken) == broken


@pytest.mark.parametrize(
    ("end", "runs", "broken"),
    [
        ("REVOKED", ["Replaced"], []),
        ("SUCCESS", ["Replaced"], ["a newer call stopped Run(id='t'"]),
        ("SUCCESS", ["return", "Replaced"], []),
    ],
)
def test_call_whose_body_was_stopped_ends_revoked(tale, end, runs, broken):
    tale.sent(task="chaos.replaces")
    for number, how in enumerate(runs):
        tale.run(1 + 2 * number, 2 + 2 * number, token=1 + number, task_id="t", how=how, task="chaos.replaces")
    tale.ends["t"] = end
    assert [line.partition(", task=")[0] for line in tale.found().broken] == broken


@pytest.mark.parametrize(
    ("end", "broken"),
    [("REVOKED", []), ("SUCCESS", ["a newer call stopped Run"])],
)
def test_call_whose_body_its_worker_killed_ends_revoked(tale, end, broken):
    tale.sent(task="chaos.replaces_kill")
    tale.run(1, None, token=1, task_id="t", task="chaos.replaces_kill")
    tale.note(2, "killed", pid=11)
    tale.run(2.1, 3, token=2, pid=12)
    tale.ends["t"] = end
    assert tale.found().hows == {"killed": 1, "return": 1}
    assert [line.partition("(")[0] for line in tale.found().broken] == broken


def test_key_is_free_1_s_after_a_childs_death_and_a_lease_after_a_workers():
    assert too_late({"kill child": [0.9], "kill group": [2.05]}, TTL) == []
    assert len(too_late({"kill child": [0.3, 1.1], "kill group": [2.4]}, TTL)) == 2


def test_the_same_seed_gives_the_same_faults_and_another_seed_others():
    pools = ["prefork", "threads"]
    assert schedule(7, 600, 1.0, pools) == schedule(7, 600, 1.0, pools) != schedule(8, 600, 1.0, pools)


def test_ten_minutes_are_five_hundred_faults_or_more_and_of_every_kind():
    faults = schedule(1, 600, 1.0, ["prefork", "prefork", "threads", "gevent"])
    assert len(faults) >= 500
    assert {fault.kind for fault in faults} == set(KINDS)
