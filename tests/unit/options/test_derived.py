"""Values that follow from the options of a task."""

from typing import Any

import pytest

from celery_dlock import LockOptions

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key": "order:{number}", "scope": "shared", "ttl": 5, "limit": 3},
        {"on_conflict": "retry", "retry_limit": 3},
        {"on_conflict": "raise", "on_store_error": "run"},
        {"on_lost": "abort"},
    ],
    ids=str,
)
def test_options_without_a_step_of_their_own_in_a_run_are_simple(options: dict[str, Any]) -> None:
    assert LockOptions(**options).is_simple


@pytest.mark.parametrize(
    "options",
    [
        {"on_conflict": "queue"},
        {"on_conflict": "replace"},
        {"wait": 2},
        {"unique": "queued"},
        {"once_per": 60},
        {"once_per": "tick"},
        {"min_hold": 1},
        {"max_hold": 5},
        {"keep_on_retry": True},
        {"on_store_error": "local"},
    ],
    ids=str,
)
def test_options_that_add_a_step_to_a_run_are_not_simple(options: dict[str, Any]) -> None:
    """A run skips all these steps if its options are simple."""
    assert not LockOptions(**options).is_simple
