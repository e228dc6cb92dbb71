"""Actions of an operator: what each changes, when it is refused, and that none reaches a successor."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_dlock import signals
from celery_dlock.control import ActionRefused, LockControl
from celery_dlock.errors import InvalidLockOptions
from celery_dlock.store.base import ReleaseRequest
from celery_dlock.store.model import Acquired, Duplicate, Held, Parked, Queued, Used
from celery_dlock.store.redis.keys import LockKeys
from celery_dlock.store.redis.store import RedisStore
from tests.contract import queue_helpers as queue
from tests.contract.helpers import NAME, TTL, ending_of, request_of, take
from tests.contract.test_control_reads import bury, claim, die, grant, name, use
from tests.support.servers import LOCK_USER, OPERATOR_USER

KEYS = LockKeys.of("dlock", NAME)


@pytest.fixture
def control(make_app: Callable[..., Celery], lock_url: str) -> Iterator[LockControl]:
    app = make_app(lock_url.replace(f"{LOCK_USER}:", f"{OPERATOR_USER}:"))
    with LockControl(app, user="alice") as made:
        # The messages of these tests cannot be published. That grants are published is tested with a worker.
        made._runtime.grant_publisher.publish_next = lambda name, granted: True  # type: ignore[method-assign]
        yield made


def shown(control: LockControl, text: str = "x") -> str:
    holder = control.lock(name(text).text).holder
    assert holder is not None
    return holder.acquisition


def pending(control: LockControl) -> str:
    """Return the hold that waits for the holder's release."""
    holder = control.lock(NAME.text).holder
    assert holder is not None
    assert (holder.state, holder.kept_by, bool(holder.hold)) == ("held", "", True)
    return holder.hold


def refusal(control: LockControl, acquisition: str, **facts: Any) -> str:
    with pytest.raises(ActionRefused) as refused:
        control.release(NAME.text, acquisition, **facts)
    return refused.value.why


def age(client: Any, share: float = 0.6) -> None:
    """Let this share of the ttl pass since the last renewal."""
    client.pexpire(KEYS.lock, round(TTL * (1 - share)))


def crash(store: RedisStore, acquisition: str) -> None:
    """Leave a run of unknown outcome."""
    take(store, acquisition, request_of("x", once=True))
    store.release(NAME, acquisition, ReleaseRequest(outcome_unknown=True))


class TestRelease:
    @pytest.mark.invariant("operators-free-no-successor")
    @pytest.mark.core
    def test_fresh_lease_is_refused_without_force(self, store: RedisStore, control: LockControl) -> None:
        take(store, "a.1")
        assert refusal(control, "a.1") == "fresh"
        assert store.inspect(NAME)
        control.release(NAME.text, "a.1", force=True)
        assert store.inspect(NAME) is None

    def test_lease_that_was_not_renewed_for_half_its_ttl_is_released(
        self, store: RedisStore, client: Any, control: LockControl
    ) -> None:
        take(store, "a.1")
        age(client)
        control.release(NAME.text, "a.1")
        assert store.inspect(NAME) is None

    @pytest.mark.invariant("operators-free-no-successor")
    def test_successor_of_the_shown_holder_is_not_released(self, store: RedisStore, control: LockControl) -> None:
        take(store, "a.1")
        store.release(NAME, "a.1", ReleaseRequest())
        assert refusal(control, "a.1", force=True) == "free"
        take(store, "b.1")
        assert refusal(control, "a.1", force=True) == "other"
        assert shown(control) == "b.1"

    @pytest.mark.invariant("operators-free-no-successor")
    def test_second_kept_lock_is_not_taken_for_the_first(self, store: RedisStore, control: LockControl) -> None:
        for owner in ("a.1", "b.1"):
            take(store, owner, request_of(min_hold_ms=60_000))
            store.release(NAME, owner, ReleaseRequest())
            if owner == "a.1":
                first = shown(control)
                assert refusal(control, first) == "kept"
                control.release(NAME.text, first, force=True)
        assert refusal(control, first, force=True) == "other"
        control.release(NAME.text, shown(control), force=True)
        assert store.inspect(NAME) is None

    def test_release_grants_the_next_waiter(self, store: RedisStore, control: LockControl) -> None:
        queue.take(store, "a.1", "a", NAME)
        queue.park(store, "b.1", "b", NAME)
        control.release(NAME.text, "a.1", force=True)
        view = control.lock(NAME.text)
        assert view.states == ("granted",)
        assert refusal(control, shown(control), force=True) == "granted"

    def test_release_wakes_a_call_that_waits_in_its_slot(self, store: RedisStore, control: LockControl) -> None:
        take(store, "a.1")
        listener = store.release_listener(NAME)
        assert isinstance(store.acquire(NAME, "b.1", TTL, request_of(notify=True)), Held)
        control.release(NAME.text, "a.1", force=True)
        assert listener.wait(5)

    @pytest.mark.invariant("operators-free-no-successor")
    @pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.slow)])
    def test_release_that_races_the_holders_end_never_frees_the_successor(
        self, store: RedisStore, control: LockControl, rounds: int
    ) -> None:
        results = set()
        for number in range(rounds):
            take(store, f"a.{number}")
            start = threading.Barrier(2)

            def end(number: int = number, start: threading.Barrier = start) -> None:
                start.wait()
                store.release(NAME, f"a.{number}", ReleaseRequest())
                store.acquire(NAME, f"b.{number}", TTL, request_of())

            thread = threading.Thread(target=end)
            thread.start()
            start.wait()
            # What release() runs, without its record.
            results.add(control._store.free(NAME, f"a.{number}", force=True)[0])
            thread.join()
            assert shown(control) == f"b.{number}"
            store.release(NAME, f"b.{number}", ReleaseRequest())
        assert results <= {"freed", "free", "other"}


class TestHold:
    @pytest.mark.core
    def test_free_lock_is_held_at_once_and_refuses_with_the_reason(
        self, store: RedisStore, control: LockControl
    ) -> None:
        assert control.hold(NAME.text, 60, "gateway is down")
        answer = store.acquire(NAME, "a.1", TTL, request_of("a"))
        assert isinstance(answer, Held)
        assert str(answer.holder).startswith("operator alice@")
        assert str(answer.holder).endswith("(gateway is down)")
        (view,) = control.locks().items
        assert view.holder is not None
        assert (view.states, view.holder.kept_by, view.holder.reason) == (("kept",), "operator", "gateway is down")
        assert 55 < view.holder.expires_in <= 60

    def test_hold_ends_at_unhold(self, store: RedisStore, control: LockControl) -> None:
        control.hold(NAME.text, 60, "why")
        assert refusal(control, shown(control)) == "kept"
        assert control.unhold(NAME.text)
        assert isinstance(store.acquire(NAME, "a.1", TTL, request_of("a")), Acquired)
        assert not control.unhold(NAME.text)

    def test_hold_ends_after_its_time(self, store: RedisStore, client: Any, control: LockControl) -> None:
        control.hold(NAME.text, 60, "why")
        assert 0 < client.pttl(KEYS.lock) <= 60_000
        client.pexpire(KEYS.lock, 1)
        while client.exists(KEYS.lock):
            pass
        assert control.lock(NAME.text).states == ()

    @pytest.mark.parametrize("policy", ["plain", "queue"])
    def test_hold_of_a_held_lock_begins_at_its_release(
        self, store: RedisStore, control: LockControl, policy: str
    ) -> None:
        queued = policy == "queue"
        if queued:
            queue.take(store, "a.1", "a", NAME)
            queue.park(store, "b.1", "b", NAME)
        else:
            take(store, "a.1", request_of("a"))
        assert not control.hold(NAME.text, 60, "why")
        before = control.lock(NAME.text)
        assert before.holder is not None
        assert (before.states, before.holder.operator.partition("@")[0]) == (("held",), "alice")
        released = store.release(NAME, "a.1", ending_of("a", queue=queued))
        assert released.granted is None
        assert control.lock(NAME.text).states == ("kept",)
        assert control.lock(NAME.text).waiting == (1 if queued else 0)
        assert control.unhold(NAME.text)
        assert control.lock(NAME.text).states == (("granted",) if queued else ())

    def test_pending_hold_can_be_cancelled(self, store: RedisStore, control: LockControl) -> None:
        take(store, "a.1", request_of("a"))
        control.hold(NAME.text, 60, "why")
        assert control.unhold(NAME.text)
        store.release(NAME, "a.1", ReleaseRequest())
        assert control.lock(NAME.text).states == ()

    @pytest.mark.invariant("operators-free-no-successor")
    def test_second_hold_of_an_operator_is_not_taken_for_the_first(
        self, store: RedisStore, control: LockControl
    ) -> None:
        control.hold(NAME.text, 60, "first")
        first = shown(control)
        assert control.unhold(NAME.text, hold=first)
        control.hold(NAME.text, 60, "second")
        assert refusal(control, first, force=True) == "other"
        assert not control.unhold(NAME.text, hold=first)
        control.release(NAME.text, shown(control), force=True)
        assert store.inspect(NAME) is None

    @pytest.mark.invariant("operators-free-no-successor")
    def test_hold_that_waits_for_a_later_holder_is_not_cancelled(self, store: RedisStore, control: LockControl) -> None:
        """The holder changes between the look and the command."""
        take(store, "a.1", request_of("a"))
        assert not control._store.cancel_hold(NAME, "a.1", "")
        control.hold(NAME.text, 60, "why")
        hold = pending(control)
        assert not control._store.cancel_hold(NAME, "b.1", hold)
        assert control._store.cancel_hold(NAME, "a.1", hold)

    @pytest.mark.invariant("operators-free-no-successor")
    def test_later_hold_that_waits_for_the_same_holder_is_not_cancelled(
        self, store: RedisStore, control: LockControl
    ) -> None:
        take(store, "a.1", request_of("a"))
        control.hold(NAME.text, 60, "why")
        first = pending(control)
        assert control.unhold(NAME.text)
        control.hold(NAME.text, 60, "why")
        assert not control.unhold(NAME.text, hold=first)
        assert not control._store.cancel_hold(NAME, "a.1", first)  # also if it comes between the look and the command
        assert control.unhold(NAME.text, hold=pending(control))
        store.release(NAME, "a.1", ReleaseRequest())
        assert control.lock(NAME.text).states == ()

    def test_pending_hold_precedes_the_retry_that_the_lock_is_reserved_for(
        self, store: RedisStore, control: LockControl
    ) -> None:
        take(store, "a.1", request_of("a"))
        control.hold(NAME.text, 60, "why")
        store.release(NAME, "a.1", ending_of("a", reserved_for="retry", reserved_ms=60_000))
        view = control.lock(NAME.text).holder
        assert view is not None
        assert view.kept_by == "operator"

    def test_granted_waiter_waits_again(self, store: RedisStore, client: Any, control: LockControl) -> None:
        grant(store, "x")
        assert control.hold(NAME.text, 60, "why")
        assert control.lock(NAME.text).waiting == 1
        # Its message was published for a grant that is over.
        answer = queue.ask(store, "x.2", "x", NAME, grant_id="1", republished=True)
        assert isinstance(answer, Queued)
        assert isinstance(queue.park(store, "x.3", "x", NAME), Parked)
        assert control.unhold(NAME.text)
        assert control.lock(NAME.text).states == ("granted",)

    @pytest.mark.parametrize(("seconds", "reason"), [(0.5, "why"), (60, " ")])
    def test_hold_without_a_reason_or_time_is_refused(self, control: LockControl, seconds: float, reason: str) -> None:
        with pytest.raises(InvalidLockOptions):
            control.hold(NAME.text, seconds, reason)


class TestSettling:
    @pytest.mark.core
    def test_unknown_outcome_is_resolved_by_its_name(self, store: RedisStore, control: LockControl) -> None:
        die(store, "x")
        die(store, "y")
        assert not control.resolve(NAME.text, sent=True, mark="another run")
        (run,) = control.unknown_outcomes(NAME.text).items
        assert control.resolve(NAME.text, sent=True, mark=run.mark)
        assert control.resolve(name("y").text, sent=False)
        assert control.unknown_outcomes().items == ()
        assert isinstance(store.acquire(NAME, "b.1", TTL, request_of("b", once=True)), Used)
        answer = store.acquire(name("y"), "b.1", TTL, request_of("b", once=True))
        assert isinstance(answer, Acquired)
        assert not control.resolve(NAME.text, sent=True)

    @pytest.mark.invariant("operators-free-no-successor")
    def test_mark_is_compared_when_the_outcome_is_set_not_only_before(
        self, store: RedisStore, control: LockControl, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second run crashes between the look and the command."""
        crash(store, "a.1")
        seen = control._store.describe(NAME)
        assert seen.run is not None
        assert control.resolve(NAME.text, sent=False)
        crash(store, "b.1")
        monkeypatch.setattr(type(control._store), "describe", lambda *_: seen)
        assert not control.resolve(NAME.text, sent=True, mark=seen.run.mark)
        assert not control.forget(NAME.text, mark=seen.run.mark)
        assert [run.state for run in control.unknown_outcomes(NAME.text).items] == ["unknown"]

    @pytest.mark.invariant("operators-free-no-successor")
    def test_unknown_outcomes_that_a_failed_run_left_are_told_apart(
        self, store: RedisStore, control: LockControl
    ) -> None:
        """After a failure, the mark of the crashed run before it has no acquisition."""
        marks = []
        for number in range(2):
            crash(store, f"a.{number}")
            assert isinstance(store.acquire(NAME, f"f.{number}", TTL, request_of("f", once=True)), Acquired)
            store.release(NAME, f"f.{number}", ending_of("f", once=True))
            (run,) = control.unknown_outcomes(NAME.text).items
            marks.append(run.mark)
            assert control.forget(NAME.text, mark=run.mark) is True
        assert marks[0] != marks[1]

    def test_used_name_is_forgotten(self, store: RedisStore, control: LockControl) -> None:
        use(store, "x")
        assert control.forget(NAME.text)
        assert not control.forget(NAME.text)
        assert isinstance(store.acquire(NAME, "b.1", TTL, request_of("b", once=True)), Acquired)

    @pytest.mark.core
    def test_requeued_dead_letter_waits_again(self, store: RedisStore, control: LockControl) -> None:
        bury(store, "x")
        (letter,) = control.dead_letters().items
        assert control.requeue(NAME.text, letter.identity)
        assert control.dead_letters().items == ()
        assert [waiter.task_id for waiter in control.waiting()] == ["x"]
        granted = store.release(NAME, "xh.1", queue.ending("xh")).granted
        # The test's holder knows of no waiter, so the next sweep grants.
        granted = granted or store.sweep(NAME, "s.2", 60_000, 5).granted
        assert granted
        assert granted.identity == letter.identity

    def test_claim_is_dropped(self, store: RedisStore, control: LockControl) -> None:
        claim(store, "x")
        assert control.drop_claim(NAME.text)
        assert control.claims().items == []
        assert not control.drop_claim(NAME.text)

    def test_message_that_no_app_knows_is_kept_as_a_dead_letter_when_it_is_dropped(
        self, store: RedisStore, control: LockControl
    ) -> None:
        grant(store, "x", "w")
        assert not control.drop(NAME.text, queue.digest("w"))
        assert [letter.task_id for letter in control.dead_letters().items] == ["w"]
        assert control.audit()[0].detail == "took out of the queue, but could not store the end of app.post[w]"
        # It is done, so no copy of it runs.
        assert isinstance(queue.ask(store, "w.9", "w", NAME, redelivered=True), Duplicate)


class TestAudit:
    @pytest.mark.core
    def test_each_action_is_recorded_in_store_log_and_signal(
        self, store: RedisStore, control: LockControl, caplog: pytest.LogCaptureFixture
    ) -> None:
        told = []

        def hear(event: Any, **_: Any) -> None:
            told.append((event.kind, event.name, event.owner.partition("@")[0], event.reason))

        signals.lock_operator.connect(hear, weak=False)
        try:
            take(store, "a.1")
            control.release(NAME.text, "a.1", force=True, reason="ticket 7")
            control.hold(NAME.text, 60, "why")
        finally:
            signals.lock_operator.disconnect(hear)
        newest, first = control.audit()
        assert (newest.action, first.action) == ("hold", "release")
        assert (first.user, first.name, first.reason) == ("alice", NAME.text, "ticket 7")
        assert first.detail == "released acquisition a.1 by force"
        expected = "release: released acquisition a.1 by force (reason: ticket 7)"
        assert told[0] == ("operator", NAME.text, "alice", expected)
        assert f"on {NAME.text}: {expected}" in caplog.text

    def test_newest_thousand_records_are_kept(self, control: LockControl) -> None:
        for number in range(1003):
            control._store.save_audit(float(number), f'{{"number": {number}}}')
        found = control._store.audit(2000)
        assert (len(found), found[0], found[-1]) == (1000, '{"number": 3}', '{"number": 1002}')
