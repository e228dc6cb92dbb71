"""Options that a message may choose for its call (``dlock_call_options``)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery

from celery_dlock import InvalidLockOptions, singleton_task
from celery_dlock.config.settings import Settings
from celery_dlock.options.lock_options import LockOptions
from celery_dlock.task.call_options import OPTIONS_HEADER, call_of, headers_for

pytestmark = pytest.mark.core


def a_task(setting: Any = None, *, conf: dict[str, Any] | None = None, **options: Any) -> Any:
    app = Celery("permissions", broker="redis://nowhere", set_as_current=False)
    app.conf.update(conf or {})
    if setting is not None:
        app.conf.dlock_call_options = setting

    @singleton_task(app=app, name="shop.pay", **options)
    def pay(account: int, n: int = 7) -> None: ...

    return pay


SHARED = {"key": "{account}", "scope": "shared"}
REFUSED: list[Any] = [
    ({}, {"key": "{n}", "scope": "shared"}, "scope='shared'"),
    (SHARED, {"key": "payroll"}, "key='payroll'"),
    (SHARED, {"key": ["n"]}, "key=('n',)"),
    (SHARED, {"once_per": 60}, "once_per=60.0"),
    (SHARED, {"keep_on_retry": True}, "keep_on_retry=True"),
    (
        SHARED,
        {"on_conflict": "queue", "queue_limit": 1, "queue_overflow": "drop_oldest"},
        "queue_overflow='drop_oldest'",
    ),
    (SHARED, {"on_conflict": "replace"}, "on_conflict='replace'"),
    ({}, {"on_conflict": "replace", "stop": 5}, "stop=5.0"),
    ({"on_conflict": "replace", "stop": "ask"}, {"stop": 60}, "stop=60.0"),
    ({"on_conflict": "replace", "stop": 60}, {"stop": 59}, "stop=59.0"),
    (SHARED, {"on_conflict": "queue", "debounce": 5}, "debounce=5.0"),
    ({"on_conflict": "queue", "debounce": 5}, {"debounce": 6}, "debounce=6.0"),
    ({"on_conflict": "queue", "debounce": 5}, {"debounce": (5, 60)}, "debounce=(5.0, 60.0)"),
    ({}, {"limit": 2}, "limit=2"),
    ({"limit": 3}, {"limit": 2}, "limit=2"),
    ({}, {"ttl": 31}, "ttl=31.0"),
    ({"ttl": 5}, {"ttl": 6}, "ttl=6.0"),
    ({}, {"min_hold": 31_622_400}, "min_hold=31622400.0"),
    ({"min_hold": 5}, {"min_hold": 6}, "min_hold=6.0"),
    ({"max_hold": 60}, {"max_hold": None}, "max_hold=None"),
    ({"max_hold": 60}, {"max_hold": 61}, "max_hold=61.0"),
    ({"once_per": 60}, {"once_per": "forever"}, "once_per='forever'"),
    ({"once_per": "tick"}, {"misfire_grace": 31_000_000}, "misfire_grace=31000000.0"),
    ({"unique": "queued"}, {"queued_ttl": 3601}, "queued_ttl=3601.0"),
    ({"wait": 10}, {"wait": 11}, "wait=11.0"),
]
ALLOWED: list[Any] = [
    ({}, {"key": "{n}"}),
    ({}, {"scope": "task"}),
    (SHARED, {"key": "{account}"}),
    (SHARED, {"scope": "task", "key": "{n}"}),
    (SHARED, {"on_conflict": "queue", "queue_limit": 1}),
    ({}, {"ttl": 30, "min_hold": 0, "max_hold": 60}),
    ({"min_hold": 5, "max_hold": 60}, {"min_hold": 5, "max_hold": 60}),
    ({}, {"once_per": 60, "on_used": "raise"}),
    ({"once_per": 60}, {"once_per": None}),
    ({"once_per": 60}, {"once_per": 1}),
    ({"wait": 10}, {"on_conflict": "raise", "wait": 10}),
    ({}, {"on_conflict": "queue", "queue_limit": 1, "queue_overflow": "drop_oldest"}),
    ({}, {"on_conflict": "queue", "debounce": 5}),
    ({"on_conflict": "queue", "debounce": 5}, {"debounce": 4}),
    ({"on_conflict": "queue", "debounce": 5}, {"debounce": None}),
    ({"on_conflict": "replace", "stop": 60}, {"stop": 61}),
    ({"on_conflict": "replace", "stop": 60}, {"stop": "raise"}),
    ({"on_conflict": "replace", "stop": 60}, {"on_conflict": "queue"}),
    ({}, {"enabled": False}),
    ({"limit": 3}, {"limit": 3}),
    ({}, {"keep_on_retry": True, "on_lost": "abort", "skip_result": 1}),
]


@pytest.mark.invariant("hostile-messages-end-alone")
@pytest.mark.parametrize(("own", "chosen", "shown"), REFUSED)
def test_what_reaches_beyond_the_tasks_own_is_refused_on_both_sides(own: Any, chosen: Any, shown: str) -> None:
    task = a_task(**own)
    with pytest.raises(InvalidLockOptions) as published:
        task.apply_async((1,), dlock=chosen)
    header = {"task": "shop.pay", "options": json.dumps(chosen)}
    with pytest.raises(InvalidLockOptions) as received:
        call_of(task, {OPTIONS_HEADER: header})
    for refused in (published, received):
        said = str(refused.value)
        assert said.startswith(f"task 'shop.pay': dlock: invalid {shown} in a message: expected ")
        assert said.endswith(f", or dlock_call_options that lists {shown.partition('=')[0]!r}")


@pytest.mark.parametrize(("own", "chosen"), [row[:2] for row in REFUSED])
def test_all_or_its_name_permits_an_option_with_any_value(own: Any, chosen: Any) -> None:
    for setting in ("all", list(chosen), tuple(chosen)):
        task = a_task(setting, **own)
        assert call_of(task, headers_for(task, chosen, None))


@pytest.mark.parametrize(("own", "chosen"), ALLOWED)
def test_what_stays_within_the_tasks_own_is_allowed(own: Any, chosen: Any) -> None:
    for setting in (None, "bounded"):
        task = a_task(setting, **own)
        assert call_of(task, headers_for(task, chosen, None))


def test_a_list_permits_nothing_else() -> None:
    for setting, listed in (([], "none"), (["ttl", "on_conflict"], "on_conflict, ttl")):
        task = a_task(setting)
        for chosen in ({"enabled": False}, {"retry_delay": 2}, {"key": "{n}"}):
            with pytest.raises(InvalidLockOptions) as refused:
                headers_for(task, chosen, None)
            name = next(iter(chosen))
            told = f"task 'shop.pay': dlock: {name} is not permitted in a message: dlock_call_options permits {listed}"
            assert str(refused.value) == told


def test_the_apps_ttl_bounds_a_task_that_names_none() -> None:
    task = a_task(conf={"dlock_ttl": 90})
    assert call_of(task, headers_for(task, {"ttl": 90}, None)).options.ttl == 90
    with pytest.raises(InvalidLockOptions, match=r"ttl=91\.0 in a message.*own \(90\)"):
        headers_for(task, {"ttl": 91}, None)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("some", "invalid dlock_call_options='some': expected 'bounded', 'all' or a list of options"),
        (7, "invalid dlock_call_options=7: "),
        ({"ttl": 1}, "invalid dlock_call_options={'ttl': 1}: "),
        (
            ["tll"],
            "dlock_call_options: unknown option 'tll' (did you mean 'ttl'?); all options: docs/reference/options.md",
        ),
        ([["ttl"]], "dlock_call_options: unknown option ['ttl']"),
    ],
)
def test_a_wrong_setting_is_refused(setting: Any, said: str) -> None:
    task = a_task(setting)
    for use in (lambda: Settings.of(task.app), lambda: headers_for(task, {"ttl": 5}, None)):
        with pytest.raises(InvalidLockOptions) as refused:
            use()
        assert said in str(refused.value)


def test_every_option_has_been_thought_of() -> None:
    """A new option stands here, and in docs/explanation/security.md, with what a publisher can do by it."""
    bounded = {next(iter(reversed(chosen))) for _, chosen, _ in REFUSED} | {"scope"}
    harmless = {
        "skip_result", "retry_delay", "retry_delay_max", "retry_limit", "queue_limit",
        "on_used", "after_crash", "unique", "on_duplicate", "on_store_error", "on_lost",
    }  # fmt: skip
    assert bounded | harmless == set(LockOptions.names())
    assert not bounded & harmless
