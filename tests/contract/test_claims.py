"""Claims of names, made when a message is published, against a real server."""

import pytest

from celery_dlock.keys.key_spec import shared_name
from celery_dlock.store.claim_model import ClaimExtension, ClaimRequest, ExistingCall
from celery_dlock.store.model import Requester
from celery_dlock.store.redis.scripts import SCRIPTS
from tests.contract.helpers import NAME, keys_of, load_scripts, request_of, take
from tests.support.scripts import shas
from tests.support.stores import store_at


def call_of(task_id, *, generation=0, life_ms=30_000, refuse_while_running=False, attempt="x"):
    return ClaimRequest(
        task_id, generation, life_ms, refuse_while_running, Requester.of("app.post", task_id, "node1", 77), attempt
    )


def claim(store, task_id, **facts):
    return store.claim([(NAME, call_of(task_id, **facts))])[0]


def test_free_name_is_claimed_and_the_second_call_learns_the_first(store):
    assert claim(store, "a") is None
    told = claim(store, "b")
    assert isinstance(told, ExistingCall)
    assert (told.state, told.task, told.task_id, told.node) == ("queued", "app.post", "a", "node1")
    assert told.since > 1.7e9


def test_a_claim_sent_twice_is_one_claim_and_answers_as_the_first(store, client):
    assert claim(store, "a") is None
    since = client.hget(keys_of().named("claim"), "since")
    assert claim(store, "a") is None
    assert client.hget(keys_of().named("claim"), "since") == since


@pytest.mark.invariant("claim-belongs-to-one-message")
def test_an_id_that_is_published_twice_is_refused_by_itself(store):
    assert claim(store, "a", attempt="x") is None
    assert claim(store, "a", attempt="y").task_id == "a"
    assert claim(store, "a", attempt="y", generation=2) is None
    assert claim(store, "a", attempt="z", generation=1).task_id == "a"


def test_a_claim_ends_with_its_life(store, client):
    assert claim(store, "a", life_ms=30_000) is None
    assert 29_000 < client.pttl(keys_of().named("claim")) <= 30_000


@pytest.mark.invariant("claim-belongs-to-one-message")
def test_a_claim_is_given_up_by_its_own_message_alone(store):
    assert claim(store, "a") is None
    assert store.release_claim(NAME, "b", 0) is False
    assert claim(store, "b") is not None
    assert store.release_claim(NAME, "a", 0) is True
    assert store.release_claim(NAME, "a", 0) is False
    assert claim(store, "b") is None


def test_claim_sent_after_its_rollback_takes_no_effect(store, client):
    """The claim of another attempt stays."""
    assert store.release_claim(NAME, "a", 0, "x") is False
    assert claim(store, "a", attempt="x") is None
    assert client.exists(keys_of().named("claim")) == 0
    assert claim(store, "a", attempt="y") is None
    assert store.release_claim(NAME, "a", 0, "x") is False
    assert client.hget(keys_of().named("claim"), "attempt") == "y"
    assert store.release_claim(NAME, "a", 0, "y") is True


@pytest.mark.invariant("claim-follows-its-message")
def test_a_message_that_ends_leaves_the_claim_of_its_own_retry(store):
    assert claim(store, "a", generation=0) is None
    assert claim(store, "a", generation=1) is None  # the retry, published while the first runs
    assert store.release_claim(NAME, "a", 0) is False
    assert claim(store, "b") is not None
    assert store.release_claim(NAME, "a", 1) is True


def test_keeping_prolongs_ones_own_claim_and_never_makes_or_shortens_one(store, client):
    store.extend_claims([ClaimExtension(NAME, "a", 60_000)])
    assert client.exists(keys_of().named("claim")) == 0
    assert claim(store, "a", life_ms=30_000) is None
    store.extend_claims([ClaimExtension(NAME, "b", 60_000), ClaimExtension(NAME, "a", 1_000)])
    assert 29_000 < client.pttl(keys_of().named("claim")) <= 30_000
    store.extend_claims([ClaimExtension(NAME, "a", 60_000)])
    assert 59_000 < client.pttl(keys_of().named("claim")) <= 60_000


@pytest.mark.parametrize(("running", "state"), [(False, None), (True, "running")])
def test_running_task_refuses_claims_until_its_end(store, running, state):
    take(store, "o.1", request_of("a"))
    told = claim(store, "b", refuse_while_running=running)
    assert (told and told.state) == state
    if told:
        assert (told.task, told.task_id, told.node) == ("app.post", "a", "node1")


def test_a_lock_outside_any_task_runs(store):
    take(store, "o.1")
    told = claim(store, "b", refuse_while_running=True)
    assert (told.state, told.task_id) == ("running", None)


def test_a_running_task_does_not_refuse_its_own_retry(store):
    take(store, "o.1", request_of("a"))
    assert claim(store, "a", refuse_while_running=True).state == "running"
    assert claim(store, "a", refuse_while_running=True, generation=1) is None


@pytest.mark.parametrize("fields", [{"releasing": "1"}, {"acq": "kept"}])
def test_holder_that_left_its_body_does_not_refuse_a_claim(store, client, fields):
    take(store, "o.1", request_of("a"))
    client.hset(keys_of().lock, mapping=fields)
    assert claim(store, "b", refuse_while_running=True) is None


def test_a_lock_that_is_kept_for_a_retry_is_not_free(store, client):
    take(store, "o.1", request_of("a"))
    client.hset(keys_of().lock, mapping={"acq": "reserved:successor", "releasing": "1"})
    assert claim(store, "b", refuse_while_running=True).task_id == "a"
    assert claim(store, "a", refuse_while_running=True, generation=1) is None


def test_many_claims_in_one_write_are_answered_each(store):
    calls = [(shared_name(f"n{number % 2}"), call_of(f"id{number}")) for number in range(1200)]
    answers = store.claim(calls)
    assert [answer and answer.task_id for answer in answers[:4]] == [None, None, "id0", "id1"]
    assert len(answers) == 1200
    assert answers.count(None) == 2


def test_a_claim_whose_reply_is_lost_is_ours_and_is_given_up_once(clean_server, start_proxy, client):
    load_scripts(client)
    proxy = start_proxy(clean_server)
    lossy = store_at(proxy.url(), timeout=2)
    proxy.set_mode("cut_reply", times=1, containing=shas(SCRIPTS["claim"]))
    assert claim(lossy, "a") is None
    assert client.hget(keys_of().named("claim"), "id") == "a"
    proxy.set_mode("cut_reply", times=1, containing=shas(SCRIPTS["release_claim"]))
    assert lossy.release_claim(NAME, "a", 0) is False  # the second finds nothing
    assert client.exists(keys_of().named("claim")) == 0
    lossy.close()
