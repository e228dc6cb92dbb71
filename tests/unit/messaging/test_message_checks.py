"""Checks of a message by a worker's main process, before it acts on it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from celery_dlock.messaging import message_checks
from celery_dlock.messaging.message_checks import MAX_DEPTH, check_body, check_headers, check_message, check_origin
from tests.contract.hostile import NASTY

pytestmark = pytest.mark.core

VALID: dict[str, Any] = {
    "id": "id1", "task": "shop.pay", "lang": "py", "shadow": None, "root_id": "id1", "parent_id": None, "group": None,
    "group_index": 3, "retries": 2, "timelimit": [2.5, None], "argsrepr": "('\ud800',)", "kwargsrepr": "{}",
    "replaced_task_nesting": 1, "stamped_headers": ["tenant"], "stamps": {"tenant": ["x"]}, "ignore_result": False,
    "sentry-trace": "1-2", "_schema_name": "public", "trace": {"a": [1, {"b": None}]}, "retries_of_a_tool": [1],
}  # fmt: skip


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_headers_of_celery_and_of_tracing_tools_pass() -> None:
    check_headers(VALID)
    check_headers({"id": "id1", "task": "shop.pay"})


def test_a_large_body_of_json_is_not_walked() -> None:
    """A million numbers would take longer than all else that the main process does with their message."""

    class Counted(list[int]):
        looks = 0

        def __iter__(self) -> Any:
            Counted.looks += 1
            return super().__iter__()

    args = Counted(range(10))
    check_headers({"id": "id1", "task": "shop.pay", "args": args, "kwargs": {}})
    check_body([args, {}, {}], b"[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], {}, {}]")
    assert not Counted.looks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", None), ("id", ""), ("id", 7), ("id", ["x"]), ("id", "\ud800"), ("root_id", {}), ("group", "\udfff"),
        ("shadow", ["x"]), ("retries", [1]), ("retries", -1), ("retries", 10**400), ("retries", 1.5), ("retries", True),
        ("replaced_task_nesting", "1"), ("group_index", 2**63), ("timelimit", 5), ("timelimit", [1]),
        ("timelimit", ["x", None]), ("timelimit", [float("nan"), None]), ("timelimit", [10**400, None]),
        ("timelimit", [-1, None]), ("stamped_headers", [["x"]]), ("stamped_headers", "x"), ("stamps", ["x"]),
        ("argsrepr", 5), ("trace", nested(MAX_DEPTH + 1)), ("stamps", {"x": nested(MAX_DEPTH + 1)}),
    ],
)  # fmt: skip
def test_a_malformed_header_is_named_without_its_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"header '{name}': expected ") as refused:
        check_headers({**VALID, name: value})
    assert len(str(refused.value)) < 100


@pytest.mark.parametrize("body", [[[], {}, {}], ((1, [2]), {"a": {}}, None), [[], {}, {"chain": [{}], "chord": {}}]])
def test_a_body_of_celery_passes(body: Any) -> None:
    check_body(body)


@pytest.mark.parametrize(
    "body",
    [
        5, "abc", [], [1, 2], {"a": 1, "b": 2, "c": 3}, [5, {}, {}], [[], [], {}], [[], {}, []], [[], {}, "x"],
        [[], {}, {"callbacks": "x"}], [[], {}, {"chain": [5]}], [[], {}, {"chord": 5}], [[], {}, {5: None}],
        [[], {}, {"properties": {"dlock": []}}], [[], {}, {"retries": [1]}], [[nested(MAX_DEPTH)], {}, {}],
    ],
)  # fmt: skip
def test_a_malformed_body_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match="body: expected "):
        check_body(body)


def test_the_depth_of_json_is_counted_by_its_brackets() -> None:
    deep = [[nested(MAX_DEPTH)], {}, {}]
    check_body(deep, b"[[], {}, {}]")
    for text in ("[" * (MAX_DEPTH + 1), b"{" * (MAX_DEPTH + 1)):
        with pytest.raises(ValueError, match="nested levels"):
            check_body(deep, text)


def test_shared_and_cyclic_containers_are_looked_at_once_a_level() -> None:
    """A YAML message may name one list twice in each level: 2 ** 100 paths lead to the innermost."""
    bomb: Any = []
    for _ in range(100):
        bomb = [bomb, bomb]
    began = time.monotonic()
    check_body([[bomb], {}, {}])
    assert time.monotonic() - began < 1
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="nested levels"):
        check_body([cycle, {}, {}])


@pytest.mark.parametrize(
    ("properties", "info"),
    [
        ({"reply_to": 5}, {}), ({"correlation_id": ["x"]}, {}), ({"priority": 10**400}, {}), ({"priority": "5"}, {}),
        ({"delivery_mode": [2]}, {}), ({}, {"exchange": ["x"]}), ({}, {"routing_key": 5}),
        ({}, {"routing_key": "\ud800"}),
    ],
)  # fmt: skip
def test_a_malformed_origin_is_refused(properties: Any, info: Any) -> None:
    check_origin({"reply_to": None, "priority": 9, "delivery_mode": 2}, {"exchange": "", "routing_key": "celery"})
    with pytest.raises(ValueError, match="expected"):
        check_origin(properties, info)


COMMON: dict[str, Any] = {
    "id": "id1", "task": "shop.pay", "lang": "py", "shadow": None, "root_id": "id1", "parent_id": None, "group": None,
    "group_index": None, "retries": 0, "timelimit": [None, None], "argsrepr": "(1,)", "kwargsrepr": "{}",
    "replaced_task_nesting": 0, "stamped_headers": None, "stamps": {}, "ignore_result": False, "traceparent": "0-1",
}  # fmt: skip
PROPERTIES: dict[str, Any] = {"correlation_id": "id1", "reply_to": "r", "priority": 0, "delivery_mode": 2}
ORIGIN: dict[str, Any] = {"exchange": "", "routing_key": "celery", "redelivered": False}


def refused(check: Any, *args: Any) -> bool:
    try:
        check(*args)
    except ValueError:
        return True
    return False


def test_common_message_is_not_checked_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_checks, "check_headers", pytest.fail)
    check_message({**COMMON, "properties": PROPERTIES, "delivery_info": ORIGIN}, PROPERTIES, ORIGIN, [[], {}, {}])


@pytest.mark.parametrize("name", ["x" * 100_000, 7**100_000, b"x" * 100_000], ids=["text", "number", "bytes"])
def test_large_description_that_a_publisher_chose_uses_no_memory_after_check(name: Any) -> None:
    """The last 64 forms are kept with their names. Expected of a large form: it is checked, and not kept."""
    kept = message_checks._form_of.cache_info().currsize
    check_message({**COMMON, name: 1}, PROPERTIES, ORIGIN, [[], {}, {}])
    check_message(COMMON, {**PROPERTIES, name: 1}, ORIGIN, [[], {}, {}])
    check_message(COMMON, PROPERTIES, {**ORIGIN, name: 1}, [[], {}, {}])
    assert refused(check_message, COMMON, PROPERTIES, ORIGIN, [1] * 100_000)
    assert message_checks._form_of.cache_info().currsize == kept


@pytest.mark.parametrize("part", ["headers", "properties", "delivery_info"])
def test_message_is_refused_if_a_field_of_it_is(part: str) -> None:
    """`check_message` skips the check of each field if a message has the common form."""
    parts: dict[str, dict[Any, Any]] = {"headers": COMMON, "properties": PROPERTIES, "delivery_info": ORIGIN}
    values = [*NASTY, (None, None), [None], {1}, True, 1.0, 256, -1, nested(MAX_DEPTH + 1)]
    for name, value in itertools.product([*parts[part], "unknown", None], values):
        changed = {**parts, part: {**parts[part], name: value}}
        properties, info = changed["properties"], changed["delivery_info"]
        headers = {**changed["headers"], "properties": properties, "delivery_info": info}
        expected = refused(check_headers, headers) or refused(check_origin, properties, info)
        assert refused(check_message, headers, properties, info, [[], {}, {}]) is expected, (name, value)
