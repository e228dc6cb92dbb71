"""LockOptions: every option, what it takes and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import sys
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from celery_dlock import InvalidLockOptions, LockOptions
from celery_dlock.options.durations import as_seconds
from celery_dlock.options.lock_options import DEFAULT_TTL, OPTIONS, UNSET

DEFAULTS = {
    "key": None,
    "scope": "task",
    "ttl": 30.0,
    "on_conflict": "skip",
    "retry_delay": 1.0,
    "retry_delay_max": 60.0,
    "retry_limit": None,
    "wait": 0.0,
    "queue_limit": None,
    "queue_overflow": "raise",
    "stop": "raise",
    "debounce": None,
    "limit": 1,
    "once_per": None,
    "misfire_grace": 86400.0,
    "on_used": "skip",
    "after_crash": "run",
    "on_lost": "continue",
    "min_hold": 0.0,
    "max_hold": None,
    "keep_on_retry": False,
    "on_store_error": "retry",
    "unique": None,
    "on_duplicate": "return",
    "queued_ttl": 3600.0,
}
YEAR = 366 * 24 * 3600

TAKEN = [
    ("key", "sms:{user_id}"),
    ("key", ("a", "b")),
    ("key", len),
    ("key", str),
    ("on_conflict", "skip"),
    ("on_conflict", "retry"),
    ("on_conflict", "queue"),
    ("on_conflict", "raise"),
    ("on_conflict", "replace"),
    ("wait", 0.0),
    ("ttl", 1.0),
    ("ttl", float(YEAR)),
    ("retry_delay", 0.01),
    ("retry_delay_max", 1.0),
    ("retry_limit", 0),
    ("retry_limit", 10**9),
    ("queue_overflow", "raise"),
    ("once_per", 0.001),
    ("once_per", 10.0 * YEAR),
    ("once_per", "forever"),
    ("unique", "queued"),
    ("unique", "queued+running"),
    ("skip_result", None),
    ("skip_result", {"a": 1}),
]

REFUSED = [
    # option, value, part of the message
    ("key", "", "None, a non-empty template"),
    ("key", (), "a non-empty sequence of argument names"),
    ("key", [], "a non-empty sequence of argument names"),
    ("key", ["a", 1], "a non-empty sequence of argument names"),
    ("key", 5, "or a callable"),
    ("key", b"x", "or a callable"),
    ("key", {"a"}, "or a callable"),
    ("scope", "global", "'task' or 'shared'"),
    ("scope", None, "'task' or 'shared'"),
    ("scope", ["task"], "'task' or 'shared'"),
    ("scope", "shared", "it needs key, because without a key there is no name to share"),
    ("on_conflict", "Skip", "'skip', 'retry', 'queue', 'raise' or 'replace'"),
    ("on_conflict", None, "'skip', 'retry', 'queue', 'raise' or 'replace'"),
    ("stop", "ask", "it needs on_conflict='replace'"),
    ("stop", 5.0, "it needs on_conflict='replace'"),
    ("stop", -1, "'raise', 'ask', or seconds (int, float or timedelta) of at least 0"),
    ("stop", "asks", "or seconds (int, float or timedelta) of at least 0 (did you mean 'ask'?)"),
    ("stop", "kill", "write stop=<seconds>"),
    ("on_conflict", ["skip"], "'skip', 'retry', 'queue', 'raise' or 'replace'"),
    ("on_conflict", "wait", "write wait=<seconds>, after which on_conflict applies"),
    ("ttl", 0.999, "seconds from 1 to 31622400"),
    ("ttl", 0, "seconds from 1 to 31622400"),
    ("ttl", -5, "seconds from 1 to 31622400"),
    ("ttl", YEAR + 1, "seconds from 1 to 31622400"),
    ("ttl", float("inf"), "seconds from 1 to 31622400"),
    ("ttl", float("nan"), "seconds from 1 to 31622400"),
    ("ttl", timedelta(milliseconds=999), "seconds from 1 to 31622400"),
    ("ttl", "30", "seconds (int, float or timedelta) of at least 1"),
    ("ttl", True, "seconds (int, float or timedelta) of at least 1"),
    ("ttl", None, "seconds (int, float or timedelta) of at least 1"),
    ("ttl", Decimal(30), "seconds (int, float or timedelta) of at least 1"),
    ("retry_delay", 0, "seconds from 0.01"),
    ("retry_delay", None, "seconds (int, float or timedelta) of at least 0.01"),
    ("retry_delay", 61.0, "seconds up to retry_delay_max (60.0)"),
    ("retry_delay_max", "60", "seconds (int, float or timedelta)"),
    ("retry_limit", -1, "None or a whole number of at least 0"),
    ("retry_limit", 1.0, "None or a whole number of at least 0"),
    ("retry_limit", True, "None or a whole number of at least 0"),
    ("retry_limit", "3", "None or a whole number of at least 0"),
    ("wait", -0.1, "seconds from 0"),
    ("wait", None, "seconds (int, float or timedelta) of at least 0"),
    ("wait", float("inf"), "seconds from 0 to 31622400"),
    ("queue_limit", 0, "None or a whole number of at least 1"),
    ("queue_limit", -1, "None or a whole number of at least 1"),
    ("queue_limit", 1.0, "None or a whole number of at least 1"),
    ("queue_limit", True, "None or a whole number of at least 1"),
    ("queue_limit", "3", "None or a whole number of at least 1"),
    ("queue_overflow", "drop", "'raise', 'skip' or 'drop_oldest'"),
    ("queue_overflow", None, "'raise', 'skip' or 'drop_oldest'"),
    ("queue_overflow", ["skip"], "'raise', 'skip' or 'drop_oldest'"),
    ("queue_limit", 3, "it needs on_conflict='queue'"),
    ("queue_overflow", "skip", "it needs on_conflict='queue'"),
    ("queue_overflow", "keep_latest", "write queue_limit=1, queue_overflow='drop_oldest'"),
    ("limit", 0, "a whole number from 1 to 100"),
    ("limit", 101, "a whole number from 1 to 100"),
    ("limit", True, "a whole number from 1 to 100"),
    ("limit", 2.0, "a whole number from 1 to 100"),
    ("limit", None, "a whole number from 1 to 100"),
    ("debounce", 5.0, "it needs on_conflict='queue'"),
    ("debounce", 0, "seconds from 0.001"),
    ("debounce", [5, 6, 7], "or a pair of them, the longer one last"),
    ("debounce", (5, 4), "or a pair of them, the longer one last"),
    ("debounce", ("5", 6), "or a pair of them, the longer one last"),
    ("once_per", 0, "seconds (int, float or timedelta) from 0.001"),
    ("once_per", -60, "seconds (int, float or timedelta) from 0.001"),
    ("once_per", True, "seconds (int, float or timedelta) from 0.001"),
    ("once_per", "1d", "'forever', 'tick', None, or seconds (int, float or timedelta) from 0.001 to 316224000"),
    ("once_per", 10 * YEAR + 1, "seconds (int, float or timedelta) from 0.001 to 316224000"),
    ("on_used", "drop", "'skip', 'return' or 'raise'"),
    ("on_used", "return", "it needs once_per"),
    ("on_used", "raise", "it needs once_per"),
    ("after_crash", "fail", "'run' or 'hold'"),
    ("after_crash", "hold", "it needs once_per"),
    ("on_lost", "stop", "'continue' or 'abort'"),
    ("on_lost", None, "'continue' or 'abort'"),
    ("keep_on_retry", None, "True or False"),
    ("keep_on_retry", 1, "True or False"),
    ("on_store_error", "skip", "'retry', 'fail', 'run' or 'local'"),
    ("on_store_error", None, "'retry', 'fail', 'run' or 'local'"),
    ("unique", "running+queued", "None, 'queued' or 'queued+running'"),
    ("unique", "running", "None, 'queued' or 'queued+running' (did you mean"),
    ("unique", True, "None, 'queued' or 'queued+running'"),
    ("on_duplicate", "skip", "'return' or 'raise'"),
    ("on_duplicate", "raise", "it needs unique='queued' or unique='queued+running'"),
    ("queued_ttl", 60.0, "it needs unique='queued' or unique='queued+running'"),
    ("queued_ttl", 0.5, "seconds from 1"),
    ("queued_ttl", None, "seconds (int, float or timedelta)"),
    ("min_hold", -1, "seconds from 0"),
    ("min_hold", None, "seconds (int, float or timedelta)"),
    ("max_hold", 0.5, "seconds from 1"),
    ("max_hold", True, "seconds (int, float or timedelta)"),
]


@pytest.mark.parametrize(
    ("option", "value", "chosen"),
    [
        ("skip_result", 1, {"on_conflict": "raise"}),
        ("skip_result", None, {"on_conflict": "retry"}),
        ("skip_result", 1, {"on_conflict": "raise", "wait": 5}),
        ("skip_result", 1, {"on_conflict": "queue"}),
        ("retry_limit", 3, {"on_conflict": "raise"}),
        ("retry_limit", 3, {"on_conflict": "queue"}),
        ("retry_limit", 3, {"on_conflict": "raise", "wait": 5}),
    ],
)
def test_option_without_effect_is_refused_with_its_requirement(
    option: str, value: object, chosen: dict[str, Any]
) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(**{option: value}, **chosen)
    needs = OPTIONS[option].needs
    assert needs is not None
    assert str(raised.value) == f"invalid {option}={value!r}: it needs {needs.text}"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"queue_limit": 3}, "None with queue_limit, because only the newest call waits"),
        ({"unique": "queued"}, "None with unique, because unique keeps the first call and debounce the last one"),
        ({"once_per": "tick"}, "None with once_per='tick', because each tick is to run"),
        ({"wait": 2}, "None with wait, because the call waits in the lock store from the start"),
    ],
)
def test_debounce_is_refused_beside_an_option_that_contradicts_it(chosen: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(on_conflict="queue", debounce=5, **chosen)
    assert str(raised.value) == f"invalid debounce=5.0: expected {expected}"


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (
            {"on_conflict": "replace"},
            "on_conflict='replace', because it leaves one call to run; use another policy",
        ),
        (
            {"on_conflict": "queue", "debounce": 5},
            "debounce, because it leaves one call to run; remove one of the two",
        ),
        (
            {"once_per": 60},
            "once_per, because a name has one run mark and not one for each seat; remove one of the two",
        ),
        ({"unique": "queued+running"}, "unique='queued+running', because it lets one call run; use unique='queued'"),
    ],
)
def test_limit_is_refused_beside_an_option_that_contradicts_it(chosen: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(limit=3, **chosen)
    assert str(raised.value) == f"invalid limit=3: expected 1 with {reason}"
    assert LockOptions(limit=1, **chosen).limit == 1


@pytest.mark.parametrize("policy", ["skip", "retry", "queue", "raise"])
def test_limit_is_taken_with_every_policy(policy: str) -> None:
    assert LockOptions(limit=100, wait=2, on_conflict=policy, unique="queued").limit == 100


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"once_per": 60}, "with once_per, because a stopped body has not succeeded, and its name must not stay used"),
        (
            {"keep_on_retry": True},
            "with keep_on_retry, because the newest call must not wait for the retry of an older",
        ),
        ({"unique": "queued"}, "with unique, because unique keeps the first call and replace the last one. Remove one"),
    ],
)
def test_replace_is_refused_beside_an_option_that_contradicts_it(chosen: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(on_conflict="replace", **chosen)
    assert str(raised.value).startswith(f"invalid on_conflict='replace': expected another policy {expected}")


@pytest.mark.parametrize("chosen", [{"debounce": 5}, {"queue_limit": 1}, {"once_per": None, "after_crash": "hold"}])
def test_replace_is_refused_with_an_option_that_has_no_effect(chosen: dict[str, Any]) -> None:
    with pytest.raises(InvalidLockOptions, match="it needs"):
        LockOptions(on_conflict="replace", **chosen)


def test_body_is_stopped_for_the_reasons_that_the_options_name() -> None:
    assert LockOptions(on_conflict="replace").stop_reasons == ("replaced",)
    assert LockOptions(on_conflict="replace", stop="ask", on_lost="abort").stop_reasons == ("lost",)
    assert LockOptions(on_conflict="replace", on_lost="abort").stop_reasons == ("lost", "replaced")
    assert LockOptions(on_conflict="replace", stop=30).stop_reasons == ("replaced",)
    assert not LockOptions().stop_reasons


def test_body_is_killed_only_with_seconds() -> None:
    assert LockOptions(on_conflict="replace", stop=30).kill_after == 30.0
    assert LockOptions(on_conflict="replace", stop=timedelta(minutes=1)).kill_after == 60.0
    assert LockOptions(on_conflict="replace", stop=0).kill_after == 0.0
    assert LockOptions(on_conflict="replace").kill_after is None
    assert LockOptions().kill_after is None


def test_longest_delay_of_debounce_is_ten_times_the_first_by_default() -> None:
    assert LockOptions(on_conflict="queue", debounce=5).debounce_ms == (5000, 50_000)
    assert LockOptions(on_conflict="queue", debounce=[5, timedelta(seconds=5)]).debounce_ms == (5000, 5000)
    assert LockOptions().debounce_ms == (0, 0)


@pytest.mark.parametrize(
    "chosen",
    [
        {"skip_result": 1},
        {"skip_result": 1, "wait": 2},
        {"skip_result": 1, "on_conflict": "raise", "once_per": 60},
        {"skip_result": 1, "on_conflict": "queue", "queue_overflow": "skip", "queue_limit": 3},
        {"retry_limit": 3},  # a call that has run before is republished instead of being skipped
        {"retry_limit": 3, "on_conflict": "retry"},
        {"retry_limit": 3, "on_conflict": "retry", "wait": 2},
    ],
)
def test_option_whose_requirement_is_met_is_accepted(chosen: dict[str, Any]) -> None:
    assert LockOptions(**chosen)


def test_the_defaults_are_those_of_the_documentation() -> None:
    options = LockOptions()
    assert {name: getattr(options, name) for name in DEFAULTS} == DEFAULTS
    assert options.skip_result is UNSET
    assert not options.skips_with_result
    assert set(LockOptions.names()) == {*DEFAULTS, "skip_result"}


@pytest.mark.parametrize(("option", "value"), TAKEN)
def test_what_is_allowed_is_kept_as_it_is(option: str, value: Any) -> None:
    assert getattr(LockOptions(**{option: value}), option) == value


@pytest.mark.parametrize(("option", "value", "expected"), REFUSED)
def test_invalid_value_is_refused_with_option_value_and_expectation(option: str, value: Any, expected: str) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(**{option: value})
    shown, _, rest = str(raised.value).partition(": ")
    assert shown == f"invalid {option}={value!r}"
    assert expected in rest
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("option", ["ttl", "retry_delay", "retry_delay_max", "wait", "once_per"])
def test_a_duration_may_be_an_int_or_a_timedelta_and_is_kept_as_seconds(option: str) -> None:
    every: list[Any] = [45, 45.0, timedelta(seconds=45)]
    for given in every:
        options = LockOptions(**{option: given})
        assert getattr(options, option) == 45.0
        assert type(getattr(options, option)) is float
    assert as_seconds(timedelta(minutes=1)) == 60.0


@pytest.mark.parametrize("policy", ["skip", "retry", "queue", "raise", "replace"])
def test_wait_is_taken_with_every_policy(policy: str) -> None:
    assert LockOptions(on_conflict=policy, wait=2).wait == 2.0


@pytest.mark.parametrize("overflow", ["skip", "drop_oldest"])
def test_without_a_limit_nothing_flows_over(overflow: str) -> None:
    with pytest.raises(InvalidLockOptions, match="it needs a queue_limit"):
        LockOptions(on_conflict="queue", queue_overflow=overflow)


def test_a_list_of_names_is_kept_as_a_tuple() -> None:
    assert LockOptions(key=["a", "b"]).key == ("a", "b")


def test_a_shared_scope_takes_any_key() -> None:
    for key in ("k", ["a"], lambda: "x"):
        assert LockOptions(key=key, scope="shared").scope == "shared"


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(InvalidLockOptions, match="on_conflikt"):
        LockOptions(on_conflikt="skip")  # type: ignore[call-arg]


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LockOptions().ttl = 5.0  # type: ignore[misc]


def test_explicit_ttl_differs_from_the_default_also_if_equal() -> None:
    """Only where none was written the app's ``dlock_ttl`` applies."""
    assert LockOptions().ttl is DEFAULT_TTL
    assert LockOptions(on_conflict="retry").ttl is DEFAULT_TTL
    every: list[float | timedelta] = [30, 30.0, timedelta(seconds=30)]
    for written in every:
        assert LockOptions(ttl=written).ttl is not DEFAULT_TTL
    assert dataclasses.replace(LockOptions(), key="x").ttl is DEFAULT_TTL


def test_no_skip_result_is_no_value_also_in_copies() -> None:
    assert LockOptions(skip_result=None).skips_with_result
    for copied in (copy.deepcopy(LockOptions()), pickle.loads(pickle.dumps(LockOptions()))):
        assert not copied.skips_with_result
    assert re.fullmatch("UNSET", repr(UNSET))


@pytest.mark.parametrize(
    ("other", "allowed"),
    [
        ({"once_per": 60}, "'retry' or 'fail' with once_per, because only the store can record a success"),
        (
            {"on_conflict": "queue"},
            "'retry' or 'fail' with on_conflict='queue', because the call may already wait in the store",
        ),
    ],
)
@pytest.mark.parametrize("without", ["run", "local"])
def test_a_task_that_needs_its_store_cannot_run_without_it(other: dict[str, Any], allowed: str, without: str) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(on_store_error=without, **other)
    assert str(raised.value) == f"invalid on_store_error={without!r}: expected {allowed}"
    for policy in ("retry", "fail"):
        LockOptions(on_store_error=policy, **other)


def test_local_is_refused_with_a_limit_above_1() -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(on_store_error="local", limit=2)
    assert str(raised.value) == (
        "invalid on_store_error='local': expected 'retry', 'fail' or 'run' with a limit above 1, because a machine has "
        "one lock file for each name"
    )
    LockOptions(on_store_error="run", limit=2)


def test_local_is_refused_on_a_platform_without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(on_store_error="local")
    assert str(raised.value) == (
        "invalid on_store_error='local': expected 'retry', 'fail' or 'run' on this platform, which has no flock for "
        "lock files"
    )
    LockOptions(on_store_error="run")


@pytest.mark.parametrize("unique", ["queued", "queued+running"])
def test_a_window_is_not_shorter_than_what_a_lost_message_costs(unique: str) -> None:
    with pytest.raises(InvalidLockOptions) as raised:
        LockOptions(unique=unique, once_per=60, queued_ttl=120)
    assert str(raised.value) == (
        f"invalid once_per=60.0: expected at least queued_ttl (120.0) with unique={unique!r}; raise it, or lower "
        "queued_ttl to 60 or less"
    )
    LockOptions(unique=unique, once_per=120, queued_ttl=timedelta(minutes=2))
