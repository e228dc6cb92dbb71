"""``unique="queued"``: a name belongs to a message from its publication on; real workers."""

import time

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from celery_dlock import LockHeld
from tests.support.environments.claiming import Claims, urls_of
from tests.support.polling import eventually
from tests.support.servers import Server
from tests.support.workers import loaded_app, running_worker

APP = "tests.support.apps.claiming"
#: Celery's own call, with which it stores a result here too.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
WAIT = 20


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claims")
    with (
        Server(folder / "server") as server,
        loaded_app(APP, urls_of(server)) as tasks,
        running_worker(APP, folder=folder, urls=urls_of(server), concurrency=2) as worker,
    ):
        made = Claims(server, tasks)
        made.worker = worker
        yield made


@pytest.mark.invariant("claim-belongs-to-one-message")
def test_unique_queued_refuses_a_call_until_the_first_starts(environment):
    queued = environment.tasks.queued
    first = queued.delay("q", gate="q")
    environment.wait_at("q")
    environment.wait_free(queued, "q")
    second = queued.delay("q")
    assert second.id != first.id
    refused = queued.delay("q")
    assert refused.id == second.id
    environment.open("q")
    assert refused.get(timeout=WAIT) == "q"
    assert first.get(timeout=WAIT) == "q"
    environment.wait_free(queued, "q")
    assert environment.runs("q") == [first.id, second.id]


@pytest.mark.invariant("claim-follows-its-message")
def test_message_republished_at_a_conflict_keeps_its_claim(environment):
    queued = environment.tasks.queued
    first = queued.delay("conflict", gate="conflict")
    environment.wait_at("conflict")
    second = queued.delay("conflict")
    eventually(lambda: environment.worker.log().count(f"[{second.id}] is republished") >= 3, 20)
    assert environment.of(queued, "conflict") == second.id
    environment.open("conflict")
    assert [first.get(timeout=WAIT), second.get(timeout=WAIT)] == ["conflict", "conflict"]


def test_unique_queued_running_refuses_a_call_until_the_first_ends(environment):
    both = environment.tasks.both
    first = both.delay("b", gate="b")
    environment.wait_at("b")
    environment.wait_free(both, "b")
    refused = both.delay("b")
    assert refused.id == first.id
    environment.open("b")
    assert refused.get(timeout=WAIT) == "b"
    eventually(lambda: both.delay("b").id != first.id, 5, message="accepted after the end")
    eventually(lambda: len(environment.runs("b")) == 2, 10)


def test_refused_call_may_raise_an_error_that_names_the_first(environment):
    loud = environment.tasks.loud
    before = time.time()
    first = loud.delay("loud", gate="loud")
    with pytest.raises(LockHeld) as told:
        loud.delay("loud")
    error = told.value
    assert error.name == loud.lock_name("loud")
    assert error.task_id == first.id
    assert before - 5 < error.since < time.time() + 5
    environment.wait_at("loud")
    with pytest.raises(LockHeld, match=r"is running"):
        loud.delay("loud")
    environment.open("loud")
    first.get(timeout=WAIT)


def test_failed_run_has_released_its_claim(environment):
    first = environment.tasks.both.delay("fails", end="fail")
    with pytest.raises(ValueError, match="as asked"):
        first.get(timeout=WAIT)
    eventually(lambda: environment.tasks.both.delay("fails").id != first.id, 5)


@pytest.mark.invariant("claim-belongs-to-one-message", "claim-is-released")
def test_skipped_message_releases_its_claim(environment):
    skipping = environment.tasks.skipping
    first = skipping.delay("skip", gate="skip")
    environment.wait_at("skip")
    second = skipping.delay("skip")
    with pytest.raises(TaskRevokedError):
        second.get(timeout=WAIT)
    environment.wait_free(skipping, "skip")
    environment.open("skip")
    first.get(timeout=WAIT)


@pytest.mark.invariant("claim-is-released")
def test_expired_message_releases_its_claim(environment):
    late = environment.tasks.queued.apply_async(("late",), countdown=1, expires=0.5)
    assert environment.of(environment.tasks.queued, "late") == late.id
    with pytest.raises(TaskRevokedError):
        late.get(timeout=WAIT)
    environment.wait_free(environment.tasks.queued, "late")
    assert environment.runs("late") == []


@pytest.mark.invariant("claim-is-released")
def test_revoked_message_with_a_far_eta_releases_its_claim_at_once(environment):
    result = environment.tasks.queued.apply_async(("revoked",), countdown=3000)
    eventually(lambda: f"[{result.id}] received" in environment.worker.log())
    result.revoke()
    environment.wait_free(environment.tasks.queued, "revoked")


@pytest.mark.invariant("claim-is-released")
def test_purged_message_blocks_its_name_for_queued_ttl(environment):
    queued = environment.tasks.queued
    sent = time.monotonic()
    lost = queued.apply_async(("purged",), queue="nobody", dlock={"queued_ttl": 3})
    with environment.tasks.app.connection_for_write() as connection:
        assert connection.default_channel.queue_purge("nobody") == 1
    assert queued.delay("purged").id == lost.id
    eventually(lambda: queued.delay("purged").id != lost.id, 10)
    assert 2.95 < time.monotonic() - sent < 6


@pytest.mark.invariant("claim-follows-its-message")
def test_a_message_that_waits_in_a_worker_keeps_its_claim_for_longer_than_queued_ttl(environment):
    queued = environment.tasks.queued
    with environment.busy_pool("kept"):
        first = queued.apply_async(("kept",), dlock={"queued_ttl": 4})
        end = time.monotonic() + 6
        eventually(lambda: environment.of(queued, "kept") != first.id or time.monotonic() > end, 8)
        assert queued.delay("kept").id == first.id
    assert first.get(timeout=WAIT) == "kept"
    environment.wait_free(queued, "kept")


def test_queued_ttl_counts_from_the_eta(environment):
    result = environment.tasks.queued.apply_async(("eta",), countdown=100, queue="nobody", dlock={"queued_ttl": 10})
    name = environment.tasks.queued.lock_spec.name_of(("eta",), {})
    left = environment.locks.ttl(f"dlock:{{{name.bucket:03x}}}:claim:{name.text}")
    assert 105 <= left <= 110, result


def test_a_retry_keeps_the_name_and_is_not_refused_by_itself(environment):
    both = environment.tasks.both
    first = both.delay("again", end="retry")
    eventually(lambda: first.state == "RETRY", 10)
    assert environment.of(both, "again") == first.id
    assert both.delay("again").id == first.id
    assert first.get(timeout=WAIT) == "again"
    environment.wait_free(both, "again")
    assert environment.runs("again") == [first.id, first.id]


@pytest.mark.invariant("claim-loses-no-work")
def test_retry_is_published_if_another_call_has_claimed_its_name(environment):
    queued = environment.tasks.queued
    first = queued.delay("half", gate="half", end="retry")
    environment.wait_at("half")
    second = queued.delay("half")
    assert second.id != first.id
    environment.open("half")
    assert [first.get(timeout=WAIT), second.get(timeout=WAIT)] == ["half", "half"]
    assert sorted(environment.runs("half")) == sorted([first.id, first.id, second.id])


def test_a_parked_message_needs_no_claim_to_be_queued(environment):
    parking = environment.tasks.parking
    first = parking.delay("parked", gate="parked")
    environment.wait_at("parked")
    second = parking.apply_async(("parked",), dlock={"queued_ttl": 1})
    eventually(lambda: second.state == "QUEUED", 10)
    environment.wait_free(parking, "parked")
    third = parking.delay("parked")
    assert third.id == second.id
    environment.open("parked")
    assert [first.get(timeout=WAIT), third.get(timeout=WAIT)] == ["parked", "parked"]


def test_revoked_parked_message_releases_its_claim(environment):
    parking = environment.tasks.parking
    first = parking.delay("oust", gate="oust")
    environment.wait_at("oust")
    second = parking.delay("oust")
    eventually(lambda: parking.waiting("oust").count == 1, 10)
    second.revoke()
    environment.wait_free(parking, "oust")
    environment.open("oust")
    first.get(timeout=WAIT)


def test_expired_parked_message_releases_its_claim(environment):
    parking = environment.tasks.parking
    first = parking.delay("stale", gate="stale")
    environment.wait_at("stale")
    second = parking.apply_async(("stale",), expires=3)
    eventually(lambda: second.state == "QUEUED", 10)
    expired = time.monotonic() + 3
    eventually(lambda: time.monotonic() > expired, 5)
    assert environment.of(parking, "stale") == second.id
    environment.open("stale")
    first.get(timeout=WAIT)
    environment.wait_free(parking, "stale")
    assert environment.runs("stale") == [first.id]


def test_a_refused_member_of_a_group_ends_revoked_and_the_others_run(environment):
    step = environment.tasks.step
    first = step.apply_async(("taken",), countdown=3000)
    result = group(step.s("g1"), step.s("taken"), step.s("g2"), step.s("g1")).apply_async()
    eventually(result.ready, 15)
    assert [member.state for member in result] == ["SUCCESS", "REVOKED", "SUCCESS", "REVOKED"]
    first.revoke()


@pytest.mark.invariant("claim-loses-no-work")
def test_a_chord_with_a_refused_member_ends(environment):
    step = environment.tasks.step
    first = step.apply_async(("taken2",), countdown=3000)
    result = chord([step.s("c1"), step.s("taken2")], step.s("body")).apply_async()
    eventually(result.ready, 15)
    assert (result.state, type(result.result)) == ("FAILURE", ChordError)
    first.revoke()


@pytest.mark.invariant("claim-loses-no-work")
@pytest.mark.parametrize("taken", ["one", "two", "three"])
def test_a_chain_with_a_refused_step_ends(environment, taken):
    step = environment.tasks.step
    words = [word if word != taken else f"taken-{word}" for word in ("one", "two", "three")]
    first = step.apply_async((f"taken-{taken}",), countdown=3000)
    result = chain(*(step.s(word) for word in words)).apply_async()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=15)
    assert environment.runs(f"taken-{taken}") == []
    first.revoke()


def test_a_chain_of_one_name_runs_to_its_end_under_queued_and_running(environment):
    both = environment.tasks.both
    assert chain(both.si("same"), both.si("same"), both.si("same")).apply_async().get(timeout=WAIT) == "same"


def test_later_step_that_would_raise_ends_revoked(environment):
    """No caller is left that could catch the exception."""
    first = environment.tasks.loud_step.apply_async(("taken3",), countdown=3000)
    result = chain(environment.tasks.step.s("start"), environment.tasks.loud_step.s("taken3")).apply_async()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=15)
    assert result.parent.get(timeout=5) == "start"
    first.revoke()


def test_group_with_a_raising_member_publishes_and_claims_nothing(environment):
    loud_step = environment.tasks.loud_step
    first = loud_step.apply_async(("taken4",), countdown=3000)
    with pytest.raises(LockHeld):
        group(loud_step.s("free4"), loud_step.s("taken4")).apply_async()
    assert environment.of(loud_step, "free4") is None
    first.revoke()
