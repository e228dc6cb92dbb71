"""The republished message is the raw message: only its ETA, the `dlock` header and the broker's tag differ."""

import json
import pickle

import pytest
from celery import chain, chord, group
from celery.worker.request import Request

from celery_dlock.worker import SingletonRequest
from tests.support.environments.policies import running_environment
from tests.support.messages import (
    COMBINATIONS,
    CONTENT_TYPES,
    assert_same_body_and_properties,
    body_of,
    send_with_every_option,
)
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(tmp_path_factory.mktemp("republishing"), concurrency=4) as made:
        yield made


def lying(environment, queue):
    """The messages in a queue, whatever their priority."""
    keys = [key for key in environment.broker.keys(f"{queue}*") if environment.broker.type(key) == "list"]
    return [json.loads(text) for key in keys for text in environment.broker.lrange(key, 0, -1)]


def consumed(environment, queue):
    environment.app.control.add_consumer(queue, reply=True, timeout=5, limit=1)


def published_again(environment, task_id):
    """The message as we published it, while the worker keeps it for its ETA."""
    return eventually(lambda: (m := environment.unacked(task_id))["headers"].get("dlock") and m, 10)


def compare(first, second):
    """Every field, apart from those that have to differ."""
    first_headers, second_headers = dict(first["headers"]), dict(second["headers"])
    assert second_headers.pop("eta")
    assert first_headers.pop("eta") is None
    assert second_headers.pop("dlock")["conflict_retries"] >= 1
    assert second_headers == first_headers
    assert_same_body_and_properties(first, second)


def send(signature, **options):
    return send_with_every_option(signature, {"x-tenant": "acme", "trace": {"id": 7}}, **options)


@pytest.mark.invariant("conflict-is-no-failure")
def test_every_field_survives_whatever_the_serializer_and_compression(environment, tasks, queue):
    held, results = [], []
    for serializer, compression in COMBINATIONS:
        n = environment.fresh()
        lock = tasks.parcel.lock_for(n)
        assert lock.acquire(blocking=False)
        held.append(lock)
        signature = tasks.parcel.s(n, secret="pässwort")
        results.append(send(signature, queue=queue, serializer=serializer, compression=compression))
    by_id = {message["headers"]["id"]: message for message in lying(environment, queue)}
    consumed(environment, queue)
    for (serializer, compression), result in zip(COMBINATIONS, results, strict=True):
        first = by_id[result.id]
        second = published_again(environment, result.id)
        compare(first, second)
        assert second["content-type"] == CONTENT_TYPES[serializer]
        assert bool(second["headers"].get("compression")) is bool(compression)
        assert second["headers"]["argsrepr"] == "('***',)"
    for lock in held:
        lock.release()
    for result in results:
        result.get(timeout=15)
    assert len(environment.history(what="parcel")) == len(COMBINATIONS)
    assert "pässwort" not in environment.worker.log()


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_links_stamps_and_membership_of_group_chain_and_chord_survive(environment, tasks, queue, serializer):
    n = environment.fresh()
    lock = tasks.parcel.lock_for(n)
    assert lock.acquire(blocking=False)
    member = tasks.parcel.si(n).set(queue=queue, serializer=serializer, priority=3)
    member.link(tasks.plain.si("link"))
    member.link_error(tasks.failed_link.s())
    header = group(chain(tasks.plain.si("head"), member, tasks.plain.si("next")), tasks.plain.si("other"))
    canvas = chord(header, tasks.plain.s())
    canvas.stamp(batch="b1")
    result = canvas.apply_async()
    (first,) = eventually(lambda: lying(environment, queue))
    consumed(environment, queue)
    second = published_again(environment, first["headers"]["id"])
    compare(first, second)
    assert "b1" in second["headers"]["stamps"]["batch"]
    _, _, embed = body_of(second)
    assert embed["callbacks"]
    assert embed["errbacks"]
    assert embed["chain"]
    lock.release()
    assert sorted(result.get(timeout=15)) == ["next", "other"]
    eventually(lambda: [f for f in environment.history(what="plain") if "link" in f["args"]])


def test_our_header_does_not_leak_into_the_tasks_own_retry(environment, tasks, queue):
    n = environment.fresh()
    lock = tasks.parcel_retries.lock_for(n)
    assert lock.acquire(blocking=False)
    later = tasks.parcel_retries.apply_async((n,), queue=queue)
    consumed(environment, queue)
    copy = published_again(environment, later.id)
    assert copy["headers"]["dlock"]["rank"] > 0
    lock.release()
    # The body retries itself once, in a minute: a fresh identity, which arrives when it arrives.
    own = eventually(lambda: (m := environment.unacked(later.id))["headers"]["retries"] == 1 and m)
    assert "dlock" not in own["headers"]
    assert "dlock" not in json.dumps(own["properties"])
    environment.app.control.revoke(later.id)


@pytest.mark.invariant("duplicates-do-not-run")
def test_a_retried_message_has_the_rank_of_its_own_arrival(environment, tasks):
    """A rank that leaked would be older than a done mark, and the retry would be dropped as a duplicate."""
    n = environment.fresh()
    holding = environment.hold(tasks.skips_late, n, end="retry")
    message = environment.unacked(holding.id)
    environment.deliver_again(message)
    environment.wait_for_line(holding.id, "is republished")
    assert holding.end() == n
    environment.wait_for_line(holding.id, "is a duplicate")
    assert [fact["retries"] for fact in environment.history(what="in", id=holding.id)] == [0, 1]


@pytest.mark.invariant("conflict-is-no-failure")
@pytest.mark.parametrize("kilobytes", [0, 1024])
def test_what_the_pool_child_gets_beside_the_body_costs_300_bytes_whatever_its_size(environment, kilobytes):
    task, queue = environment.tasks.parcel, f"sized{kilobytes}"
    with environment.app.connection_for_write() as connection:
        simple = connection.SimpleQueue(queue)
        task.apply_async(("n", "x" * 1024 * kilobytes), queue=queue)
        message = simple.get(timeout=5)
        sizes = {}
        for kind in (Request, SingletonRequest):
            made = kind(
                message,
                app=environment.app,
                task=task,
                hostname="here",
                body=message.body,
                headers=message.headers,
                decoded=False,
                utc=True,
            )
            # What Request.execute_using_pool hands to the pool.
            sizes[kind] = len(pickle.dumps((made._request_dict, made.body, made.content_type, made.content_encoding)))
        message.ack()
        simple.close()
    assert sizes[Request] > 1024 * kilobytes
    assert 0 < sizes[SingletonRequest] - sizes[Request] <= 300
