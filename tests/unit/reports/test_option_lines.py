"""The options of a task as the dashboard shows them to operators."""

from typing import Any

import pytest

from celery_dlock import LockOptions
from celery_dlock.options.lock_options import OPTIONS
from celery_dlock.reports.options import option_lines

#: For each option, options without it, and a value of it that is not the default.
EXAMPLES: dict[str, tuple[dict[str, Any], Any]] = {
    "key": ({}, "{shop}"),
    "scope": ({"key": "{shop}"}, "shared"),
    "ttl": ({}, 60),
    "min_hold": ({}, 7),
    "max_hold": ({}, 900),
    "limit": ({}, 3),
    "keep_on_retry": ({}, True),
    "on_conflict": ({}, "retry"),
    "skip_result": ({}, "a secret"),
    "retry_delay": ({"on_conflict": "retry"}, 2.5),
    "retry_delay_max": ({"on_conflict": "retry"}, 90),
    "retry_limit": ({"on_conflict": "retry"}, 4),
    "wait": ({}, 11),
    "queue_limit": ({"on_conflict": "queue"}, 5),
    "queue_overflow": ({"on_conflict": "queue", "queue_limit": 5}, "skip"),
    "stop": ({"on_conflict": "replace"}, 6.0),
    "debounce": ({"on_conflict": "queue"}, 5),
    "unique": ({}, "queued"),
    "on_duplicate": ({"unique": "queued"}, "raise"),
    "queued_ttl": ({"unique": "queued"}, 600),
    "once_per": ({}, 3600),
    "on_used": ({"once_per": 3600}, "raise"),
    "after_crash": ({"once_per": 3600}, "hold"),
    "misfire_grace": ({"once_per": "tick"}, 45),
    "on_lost": ({}, "abort"),
    "on_store_error": ({}, "fail"),
}


def test_every_option_has_an_example() -> None:
    assert set(EXAMPLES) == set(LockOptions.names())


@pytest.mark.parametrize("option", sorted(EXAMPLES))
def test_chosen_value_of_an_option_is_shown(option: str) -> None:
    others, value = EXAMPLES[option]
    without, lines = option_lines(LockOptions(**others)), option_lines(LockOptions(**others, **{option: value}))
    assert (set(lines) - set(without) == set()) == (option == "skip_result")


def test_every_option_but_the_secret_one_has_words_for_operators() -> None:
    assert [name for name, option in OPTIONS.items() if not option.words] == ["skip_result"]


def test_limit_is_shown_as_a_number_of_calls_at_once() -> None:
    assert "up to 3 calls of one lock name run at once" in option_lines(LockOptions(limit=3))


def test_ttl_of_the_task_is_shown_although_it_is_the_usual_one() -> None:
    """The setting `dlock_ttl` may say another one."""
    assert "the lock expires 30 s after its last renewal" in option_lines(LockOptions(ttl=30))
    assert not [line for line in option_lines(LockOptions()) if "expires" in line]


def test_duration_is_shown_with_its_unit() -> None:
    lines = option_lines(LockOptions(on_conflict="retry", retry_delay=2.5, retry_limit=4))
    assert {"its first retry comes after 2.5 s", "it fails after 4 retries"} <= set(lines)


def test_plain_task_has_two_lines() -> None:
    assert len(option_lines(LockOptions())) == 2
