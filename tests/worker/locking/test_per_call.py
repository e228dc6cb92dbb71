"""``apply_async(args, dlock={...})``: options of one call, and of that call alone."""

import json
import uuid

import pytest
from celery import chain, chord, group

from celery_dlock import InvalidLockOptions, LockHeld
from celery_dlock.task.call_options import OPTIONS_HEADER
from tests.contract.hostile import Publisher, nested
from tests.support.environments.policies import running_environment, timed
from tests.support.polling import eventually

#: As Sentry's and Datadog's integrations have it, after https://github.com/celery/celery/issues/4875.
TRACED = {"headers": {"trace": "1"}}


#: Part of a message, field and value: each of them ended every worker that received it. The last two end in the child.
MALFORMED = [
    ("headers", "retries", [1]),
    ("headers", "timelimit", ["x", None]),
    ("headers", "shadow", ["x"]),
    ("headers", "stamped_headers", [{}]),
    ("headers", "trace", nested(400, "list")),
    ("headers", "id", {}),
    (None, "body", "5"),
    (None, "body", "[[], {}, [5]]"),
    (None, "body", "[[%s], {}, {}]" % ("[" * 400 + "]" * 400)),
    (
        "headers",
        OPTIONS_HEADER,
        {"task": "retrying.calls", "options": '{"unique": "queued", "queued_ttl": 1%s}' % ("0" * 400)},
    ),
    ("headers", OPTIONS_HEADER, {"task": "retrying.calls", "options": '{"ttl": 1%s}' % ("0" * 400)}),
]

pytestmark = pytest.mark.usefixtures("show_logs")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with running_environment(
        tmp_path_factory.mktemp("calls"), app="tests.support.apps.retrying", concurrency=4
    ) as made:
        yield made


@pytest.fixture
def call(tasks):
    """Publish `tasks.calls`."""

    def publish(n, *args, **options):
        return tasks.calls.apply_async((n, *args), **options)

    return publish


def hold(environment, call, n, end="", **options):
    """A body of `n` waits at the gate of this name."""
    result = call(n, f"{n}-gate", end, **options)
    environment.entered(id=result.id)
    return result


def entry(environment, result):
    return environment.entered(id=result.id)[0]


class TestItChanges:
    @pytest.mark.invariant("call-options-stay-with-the-call")
    @pytest.mark.core
    def test_conflict_policy_changes_for_this_call_only(self, environment, call):
        n = environment.fresh()
        holder = hold(environment, call, n)
        raises = call(n, dlock={"on_conflict": "raise"})
        assert isinstance(timed(lambda: raises.get(timeout=10))[1], LockHeld)
        value = call(n, dlock={"skip_result": ["skipped"]})
        assert value.get(timeout=10) == ["skipped"]
        skips = call(n)
        skips.get(timeout=10, propagate=False)
        assert skips.state == "REVOKED"
        others = [call(n, dlock={"on_conflict": policy}) for policy in ("queue", "retry")]
        eventually(lambda: others[0].state == "QUEUED", 10, message="it is parked")
        environment.open(f"{n}-gate")
        assert [result.get(timeout=20) for result in (holder, *others)] == [n] * 3
        assert environment.overlaps(n) == 1

    def test_the_key(self, environment, tasks, call):
        n = environment.fresh()
        holder = hold(environment, call, n)
        beside = call(n, dlock={"key": "{n}:{end}"})
        assert beside.get(timeout=10) == n
        assert entry(environment, beside)["lock"] != entry(environment, holder)["lock"] == tasks.calls.lock_name(n)
        environment.open(f"{n}-gate")

    def test_the_scope(self, environment, tasks, call):
        n = environment.fresh()
        shared = call(n, dlock={"key": "{n}", "scope": "shared"})
        assert shared.get(timeout=10) == n
        assert entry(environment, shared)["lock"] == tasks.keeps.lock_name(n) != tasks.calls.lock_name(n)

    def test_the_ttl(self, environment, tasks, call):
        n = environment.fresh()
        assert entry(environment, call(n, dlock={"ttl": 5}))["ttl"] == 5
        assert entry(environment, call(environment.fresh()))["ttl"] == 30

    def test_how_long_the_lock_is_kept(self, environment, tasks, call):
        n = environment.fresh()
        assert call(n, dlock={"min_hold": 60}).get(timeout=10) == n
        holder = eventually(
            lambda: (found := tasks.calls.lock_for(n).holder()) and found.kind == "min_hold" and found, 5
        )
        assert 50 < holder.expires_in <= 60

    def test_whether_a_success_uses_the_name(self, environment, call):
        n = environment.fresh()
        assert call(n, dlock={"once_per": 60}).get(timeout=10) == n
        second = call(n, dlock={"once_per": 60})
        second.get(timeout=10, propagate=False)
        assert second.state == "REVOKED"
        assert call(n).get(timeout=10) == n  # it did not ask

    @pytest.mark.core
    def test_whether_it_takes_a_lock_at_all(self, environment, tasks, call):
        n = environment.fresh()
        holder = hold(environment, call, n)
        free = call(n, dlock={"enabled": False})
        assert free.get(timeout=10) == n
        assert {name: entry(environment, free)[name] for name in ("token", "held")} == {"token": None, "held": False}
        assert environment.locked(tasks.calls, n)
        environment.open(f"{n}-gate")
        assert holder.get(timeout=10) == n

    def test_whether_its_retry_keeps_the_lock(self, environment, tasks):
        n = environment.fresh()
        result = tasks.lets_go.apply_async((n,), {"seconds": 1.0}, dlock={"keep_on_retry": True})
        eventually(
            lambda: (found := tasks.lets_go.lock_for(n).holder()) and found.kind == "keep_on_retry",
            5,
            message="it is kept",
        )
        assert result.get(timeout=10) == n


class TestItGoesAlong:
    @pytest.mark.core
    def test_options_are_read_if_a_tracing_tool_replaced_the_messages_headers(self, environment, call):
        n = environment.fresh()
        holder = hold(environment, call, n, headers=TRACED)
        raises = call(n, dlock={"on_conflict": "raise"}, headers=TRACED)
        assert isinstance(timed(lambda: raises.get(timeout=10))[1], LockHeld)
        environment.open(f"{n}-gate")
        assert holder.get(timeout=10) == n

    def test_options_stay_with_a_retry_under_a_tracing_tool(self, environment, call):
        n = environment.fresh()
        result = call(n, "", "retry", dlock={"ttl": 7}, headers=TRACED)
        assert result.get(timeout=10) == n
        assert [fact["ttl"] for fact in environment.history(what="in", id=result.id)] == [7, 7]

    @pytest.mark.parametrize(
        "headers", [None, {"tenant": "x"}, {"tenant": "x", **TRACED}, {"tenant": "x", "headers": {}}]
    )
    @pytest.mark.core
    def test_body_sees_the_message_headers_that_celery_shows(self, tasks, headers):
        shown = [
            task.apply_async(headers=headers).get(timeout=10) for task in (tasks.plain_headers, tasks.locked_headers)
        ]
        assert shown[0] == (headers and headers.get("headers", headers))
        assert shown[0] == shown[1]

    @pytest.mark.parametrize("way", ["retry", "retry with headers"])
    def test_options_stay_with_the_tasks_own_retry(self, environment, call, way):
        n = environment.fresh()
        result = call(n, "", way, dlock={"ttl": 5})
        assert result.get(timeout=10) == n
        assert [fact["ttl"] for fact in environment.history(what="in", id=result.id)] == [5, 5]

    @pytest.mark.invariant("call-options-stay-with-the-call")
    @pytest.mark.parametrize("policy", ["retry", "queue"])
    def test_options_stay_with_a_republished_message(self, environment, call, policy):
        n = environment.fresh()
        holder = hold(environment, call, n)
        back = call(n, dlock={"on_conflict": policy, "retry_delay": 0.1, "ttl": 5})
        if policy == "retry":
            environment.wait_for_line(back.id, "is republished")
        else:
            eventually(lambda: back.state == "QUEUED", 10)
        environment.open(f"{n}-gate")
        assert (holder.get(timeout=10), back.get(timeout=10)) == (n, n)
        assert entry(environment, back)["ttl"] == 5

    def test_options_stay_in_a_chain_a_group_and_a_chord(self, environment, tasks):
        names = [environment.fresh() for _ in range(6)]
        steps = [tasks.calls.si(n).set(dlock={"ttl": 5 + place}) for place, n in enumerate(names)]
        assert chain(steps[0], steps[1]).apply_async().get(timeout=10) == names[1]
        assert group(steps[2:4]).apply_async().get(timeout=10) == names[2:4]
        assert chord([steps[4]], steps[5]).apply_async().get(timeout=10) == names[5]
        assert [environment.entered(n=n)[0]["ttl"] for n in names] == [5, 6, 7, 8, 9, 10]

    def test_options_stay_with_a_link(self, environment, tasks, call):
        first, second = environment.fresh(), environment.fresh()
        call(first, link=tasks.calls.si(second).set(dlock={"enabled": False})).get(timeout=10)
        assert environment.entered(n=second)[0]["held"] is False


class TestItGoesNoFurther:
    def test_options_do_not_leak_to_tasks_that_the_body_publishes(self, environment, tasks, call):
        n = environment.fresh()
        other = call(n, "", "publish", dlock={"enabled": False}).get(timeout=10)
        assert environment.entered(id=other)[0]["held"] is True
        same = call(n, "", "same", dlock={"enabled": False}).get(timeout=10)
        assert environment.entered(id=same)[0]["held"] is True

    @pytest.mark.invariant("call-options-stay-with-the-call")
    @pytest.mark.parametrize("end", ["replace", "replace itself"])
    def test_options_do_not_leak_to_a_replacing_task(self, environment, tasks, call, end):
        n = environment.fresh()
        result = call(n, "", end, dlock={"enabled": False})
        assert result.get(timeout=10) == n
        before, after = environment.entered(id=result.id, count=2)
        assert (before["held"], after["held"]) == (False, True)


class TestBadOnes:
    @pytest.mark.invariant("call-options-stay-with-the-call")
    @pytest.mark.parametrize(
        "header",
        [
            "x",
            {"task": "retrying.calls", "options": "{"},
            {"task": "retrying.calls", "options": '{"ttl": 0}'},
            {"task": "retrying.calls", "options": '{"key": "{nobody}"}'},
            {"task": "retrying.calls", "options": '{"unknown": 1}'},
        ],
    )
    def test_a_forged_header_fails_its_task_and_nothing_else(self, environment, call, header):
        n = environment.fresh()
        # By name: the task's own apply_async would refuse it.
        forged = environment.app.send_task("retrying.calls", (n,), headers={OPTIONS_HEADER: header})
        error = timed(lambda: forged.get(timeout=10))[1]
        assert isinstance(error, InvalidLockOptions)
        assert "task 'retrying.calls'" in str(error)
        assert forged.state == "FAILURE"
        assert call(n).get(timeout=10) == n
        environment.wait_until_drained()

    @pytest.mark.invariant("hostile-messages-end-alone")
    @pytest.mark.core
    def test_malformed_messages_end_alone_and_the_worker_runs_the_next(self, environment, call):
        publisher, tag = Publisher(0), uuid.uuid4().hex
        for number, (part, name, value) in enumerate(MALFORMED):
            message = publisher.valid()
            message["headers"] |= {"task": "retrying.calls", "id": f"{tag}-{number}"}
            message["properties"]["delivery_tag"] = f"{tag}-{number}"
            if part is None:
                message[name] = value
            else:
                message[part][name] = value
            environment.broker.lpush("celery", json.dumps(message))
        n = environment.fresh()
        assert call(n).get(timeout=20) == n
        environment.wait_until_drained()
        assert environment.worker.running
        assert environment.worker.log().count("Received invalid task message") >= len(MALFORMED) - 2

    def test_call_with_an_invalid_option_is_not_published(self, environment, call):
        with pytest.raises(InvalidLockOptions, match="dlock: invalid ttl=0: expected"):
            call(environment.fresh(), dlock={"ttl": 0})
        assert not environment.queued()


class TestEager:
    def test_options_apply_to_an_eager_call(self, environment, tasks):
        n = environment.fresh()
        result = tasks.calls.apply((n,), dlock={"ttl": 5})
        assert result.get() == n
        assert entry(environment, result)["ttl"] == 5
        free = tasks.calls.apply((n,), dlock={"enabled": False})
        assert (free.get(), entry(environment, free)["held"]) == (n, False)

    def test_options_stay_with_an_eager_retry(self, environment, tasks):
        n = environment.fresh()
        result = tasks.calls.apply((n, "", "retry"), dlock={"ttl": 5})
        assert result.get() == n
        assert [fact["ttl"] for fact in environment.history(what="in", n=n)] == [5, 5]
