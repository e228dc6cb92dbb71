"""The faults of other packages are still there. A failure here is good news: code of celery-dlock can go."""

from __future__ import annotations

import importlib
from importlib.metadata import version

import pytest

from tests.upstream.environment import reproductions


@pytest.mark.slow
@pytest.mark.parametrize("name", reproductions())
def test_fault_is_still_there(name: str) -> None:
    seen = importlib.import_module(f"tests.upstream.{name}").fault()
    installed = ", ".join(f"{package} {version(package)}" for package in ("celery", "kombu", "billiard", "redis"))
    assert seen, f"mended in {installed}: act on the row `{name}` of docs/contributing/upstream.md"
