"""A call's own options: checked where it is published, carried as text, read where it runs."""

import inspect
import json
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task, group
from celery.app.amqp import AMQP
from kombu import Producer

from celery_dlock import InvalidLockOptions, LockOptions, singleton_task
from celery_dlock.task.call_options import OPTIONS_HEADER, Call, call_of, headers_for, reject_argument_of_body

OPTIONS: dict[str, Any] = {
    "key": ["n"],
    "scope": "shared",
    "ttl": 5.0,
    "on_conflict": "queue",
    "skip_result": {"a": [1, None, "я"]},
    "retry_delay": 2.0,
    "retry_delay_max": 30.0,
    "queue_limit": 2,
    "queue_overflow": "skip",
    "on_lost": "abort",
    "min_hold": 1.0,
    "max_hold": 60.0,
    "keep_on_retry": True,
    "on_store_error": "fail",
    "enabled": False,
}


@pytest.fixture(scope="module")
def task() -> Any:
    app = Celery("calls", broker="memory://", set_as_current=False)
    app.conf.dlock_call_options = "all"

    @singleton_task(app=app, name="calls.post", key=["account", "n"], once_per=60)
    def post(account: int, n: int = 7) -> None: ...

    return post


def carried(task: Any, **chosen: Any) -> Call:
    """Return the options that a worker reads after a JSON round trip of the publisher's options."""
    return call_of(task, json.loads(json.dumps(headers_for(task, chosen, {}))))


@pytest.mark.core
def test_call_options_arrive_unchanged(task: Any) -> None:
    call = carried(task, **OPTIONS)
    seen = {name: getattr(call.options, name) for name in OPTIONS if name != "enabled"}
    assert {**seen, "key": list(seen["key"]), "enabled": call.enabled} == OPTIONS
    waiting = carried(a_task(wait=5), on_conflict="retry", wait=4.0).options
    assert (waiting.on_conflict, waiting.wait) == ("retry", 4.0)
    assert carried(a_task(), on_conflict="queue", debounce=(5, 60)).options.debounce == (5.0, 60.0)
    assert carried(task, on_conflict="retry", retry_limit=3).options.retry_limit == 3


def test_unset_call_options_come_from_the_task(task: Any) -> None:
    call = carried(task, ttl=5)
    assert call.options == LockOptions(key=["account", "n"], once_per=60, ttl=5)
    assert call.enabled
    assert call.name_of((1,), {}).text == task.lock_name(1)


@pytest.mark.parametrize(("policy", "left"), [("raise", None), ("queue", None), ("skip", 3)])
def test_task_options_without_effect_under_call_options_are_dropped(policy: str, left: int | None) -> None:
    app = Celery("calls", broker="memory://", set_as_current=False)

    @singleton_task(app=app, name="calls.idle", on_conflict="retry", retry_limit=3)
    def idle() -> None: ...

    assert carried(idle, on_conflict=policy).options == LockOptions(on_conflict=policy, retry_limit=left)


def test_default_ttl_of_a_call_follows_the_app_setting(task: Any) -> None:
    assert carried(task, on_conflict="raise").options.ttl_or(12.0) == 12.0
    assert carried(task, ttl=30.0).options.ttl_or(12.0) == 30.0


def test_call_option_accepts_timedelta(task: Any) -> None:
    assert carried(task, ttl=timedelta(minutes=1)).options.ttl == 60.0


@pytest.mark.parametrize("key", ["{account}", ["account"], ("account",)])
def test_call_key_names_the_lock(task: Any, key: Any) -> None:
    call = carried(task, key=key)
    assert call.name_of((1, 2), {}) == call.name_of((1, 3), {})
    assert call.name_of((1, 2), {}) != call.name_of((2, 2), {})


@pytest.mark.invariant("call-options-stay-with-the-call")
@pytest.mark.core
@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("queue", "invalid dlock='queue': expected a dict of options"),
        ([("ttl", 5)], ": expected a dict of options"),
        ({"tll": 5}, "dlock: unknown option 'tll' (did you mean 'ttl'?); all options: docs/reference/options.md"),
        ({7: 5}, "dlock: unknown option 7; all options: "),
        ({"enabled": "no"}, "dlock: invalid enabled='no': expected True or False"),
        ({"ttl": 0.5}, "dlock: invalid ttl=0.5: expected seconds from 1"),
        ({"on_conflict": "drop"}, "dlock: invalid on_conflict='drop': expected 'skip'"),
        (
            {"key": "{amount}"},
            "dlock: invalid key='{amount}': field {amount} names no argument (did you mean ",
        ),
        ({"key": len}, "invalid key=<a callable>: expected a template or argument names"),
        ({"key": None, "scope": "shared"}, "dlock: invalid scope='shared': it needs key"),
        (
            {"on_store_error": "run"},
            "dlock: invalid on_store_error='run': expected 'retry' or 'fail' with once_",
        ),
        ({"skip_result": b"x"}, "dlock: invalid skip_result=b'x': expected a value that JSON can hold"),
        ({"skip_result": {1: 2}}, "dlock: invalid skip_result={1: 2}: expected a value that JSON can hold"),
        ({"skip_result": float("nan")}, "dlock: invalid skip_result=nan: expected a value that JSON can hold"),
    ],
)
def test_invalid_call_option_is_refused_at_the_call(task: Any, chosen: Any, said: str) -> None:
    for door in (task.apply_async, task.apply):
        with pytest.raises(InvalidLockOptions) as refused:
            door((1,), dlock=chosen)
        assert str(refused.value).startswith("task 'calls.post': ")
        assert said in str(refused.value)


@pytest.mark.parametrize(
    "header",
    ["x", 7, [], {}, {"options": {}}, {"task": "calls.post"}, {"task": "calls.post", "options": {"ttl": 5}}]
    + [{"task": "calls.post", "options": text} for text in ("", "7", "[]", "null", "{", "[" * 100_000)],
)
def test_malformed_options_header_is_an_error(task: Any, header: Any) -> None:
    with pytest.raises(InvalidLockOptions, match="invalid header 'dlock_call': expected one that apply_async"):
        call_of(task, {OPTIONS_HEADER: header})


@pytest.mark.parametrize(
    "options",
    [
        '{"ttl": 1%s}' % ("0" * 400),
        '{"ttl": -1%s}' % ("0" * 400),
        '{"ttl": ' + "[" * 400 + "]" * 400 + "}",
        '{"ttl": "%s"}' % ("x" * 100_000),
        '{"ttl": NaN}',
        '{"ttl": Infinity}',
        '{"key": ["\\ud800"]}',
        '{"once_per": [1]}',
        '{"%s": 1}' % ("x" * 100_000),
        '{"retry_limit": 1e400}',
        '{"stop": {"replicas": 1%s}}' % ("0" * 400),
    ],
)  # fmt: skip
def test_huge_header_value_gives_a_short_error(task: Any, options: str) -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        call_of(task, {OPTIONS_HEADER: {"task": "calls.post", "options": options}})
    assert len(str(refused.value)) < 1500


@pytest.mark.invariant("hostile-messages-end-alone")
@pytest.mark.parametrize(
    "key", ["{n.__init__.__globals__[os].environ[HOME]}", "{n.real}", "{n!r}", "{n:>300000000}", "{n}" * 21]
)
def test_key_from_a_message_may_not_read_attributes(task: Any, key: str) -> None:
    with pytest.raises(InvalidLockOptions, match=r"'calls\.post': dlock: invalid key="):
        call_of(task, {OPTIONS_HEADER: {"task": "calls.post", "options": json.dumps({"key": key})}})
    with pytest.raises(InvalidLockOptions, match=r"'calls\.post': dlock: invalid key="):
        headers_for(task, {"key": key}, None)


def test_call_may_repeat_the_tasks_own_key() -> None:
    task = a_task(key="{n!r:>5}")
    assert carried(task, key="{n!r:>5}").name_of((1,), {}).text == task.lock_name(1)


def test_header_option_that_the_task_forbids_is_an_error(task: Any) -> None:
    with pytest.raises(InvalidLockOptions, match="dlock: unknown option 'newer'"):
        call_of(task, {OPTIONS_HEADER: {"task": "calls.post", "options": '{"newer": 1}'}})


def test_options_header_of_another_task_is_ignored(task: Any) -> None:
    headers = {OPTIONS_HEADER: {"task": "calls.other", "options": '{"enabled": false}'}}
    assert call_of(task, headers) == call_of(task, None)


def test_other_message_headers_are_kept(task: Any) -> None:
    headers = headers_for(task, {"ttl": 5}, {"tenant": "x"})
    assert headers == {"tenant": "x", OPTIONS_HEADER: {"task": "calls.post", "options": '{"ttl": 5.0}'}}


def a_task(**options: Any) -> Any:
    app = Celery("calls", broker="memory://", set_as_current=False)

    @singleton_task(app=app, name="calls.other", **options)
    def other(n: int) -> None: ...

    return other


def test_call_that_disables_an_option_drops_its_dependent_options() -> None:
    task = a_task(
        on_conflict="queue",
        queue_limit=5,
        once_per=60,
        after_crash="hold",
        on_used="raise",
        unique="queued",
        queued_ttl=30,
    )
    chosen = {"on_conflict": "skip", "once_per": None, "unique": None}
    options = call_of(task, headers_for(task, chosen, None)).options
    assert (options.on_conflict, options.queue_limit, options.queue_overflow) == ("skip", None, "raise")
    assert (options.once_per, options.after_crash, options.on_used) == (None, "run", "skip")
    assert (options.unique, options.on_duplicate, options.queued_ttl) == (None, "return", 3600.0)


def test_call_that_chooses_a_policy_keeps_the_tasks_wait() -> None:
    task = a_task(wait=5)
    options = call_of(task, headers_for(task, {"on_conflict": "retry"}, None)).options
    assert (options.on_conflict, options.wait) == ("retry", 5.0)


def test_dependent_option_of_a_disabled_option_is_refused() -> None:
    with pytest.raises(InvalidLockOptions, match="queue_limit=7"):
        headers_for(a_task(on_conflict="queue", queue_limit=5), {"on_conflict": "skip", "queue_limit": 7}, None)


@pytest.mark.parametrize(
    "call",
    [
        lambda task: task.apply_async((1,), on_conflict="raise"),
        lambda task: task.apply((1,), on_conflict="raise"),
        lambda task: task.s(1).set(on_conflict="raise").apply_async(),
        lambda task: group(task.s(1), task.s(2)).apply_async(on_conflict="raise"),
        lambda task: task.retry(on_conflict="raise"),
    ],
    ids=["apply_async", "apply", "set", "group", "retry"],
)
def test_option_beside_dlock_is_refused_with_the_right_place(task: Any, call: Any) -> None:
    """Celery would take it for one of the broker's, and drop it."""
    with pytest.raises(InvalidLockOptions) as refused:
        call(task)
    told = "task 'calls.post': misplaced on_conflict='raise': expected dlock={'on_conflict': 'raise'}"
    assert str(refused.value) == told


@pytest.mark.parametrize("option", LockOptions.names())
def test_every_option_beside_dlock_is_refused(task: Any, option: str) -> None:
    with pytest.raises(InvalidLockOptions, match=f"'calls.post': misplaced {option}=None: "):
        task.apply_async((1,), **{option: None})


def test_no_option_name_collides_with_celery_or_kombu() -> None:
    """Else a call could not give that one."""
    knows = (Task.apply_async, Task.apply, Task.retry, Celery.send_task, AMQP.as_task_v2, Producer.publish)
    known = {name for call in knows for name in inspect.signature(call).parameters}
    properties = {"content_type", "correlation_id", "delivery_mode", "message_id", "reply_to", "user_id", "app_id"}
    assert not (known | properties | {name for name, _ in Task.from_config}) & set(LockOptions.names())


def test_stamped_header_may_have_the_name_of_an_option(task: Any) -> None:
    stamped = task.s(1)
    stamped.stamp(key="customer")
    assert stamped.apply_async().id


@pytest.mark.parametrize("call", [lambda task: task.delay(1, dlock={}), lambda task: task.s(1, dlock={}).apply_async()])
def test_dlock_among_the_arguments_is_refused_with_the_right_place(task: Any, call: Any) -> None:
    with pytest.raises(InvalidLockOptions) as refused:
        call(task)
    assert str(refused.value) == (
        "task 'calls.post': misplaced argument 'dlock': delay() and s() pass it to the task's function, which has no "
        "such argument; expected apply_async(args, kwargs, dlock={...}) or s(...).set(dlock={...})"
    )


def test_argument_named_dlock_of_a_task_is_an_argument() -> None:
    """Also of a function that takes any keyword."""
    app = Celery("named", broker="memory://", set_as_current=False)

    @singleton_task(app=app, name="named.one")
    def one(dlock: int) -> None: ...

    @singleton_task(app=app, name="named.any")
    def any_keyword(**more: int) -> None: ...

    for task in (one, any_keyword):
        reject_argument_of_body(task, {"dlock": 1})
