"""docs/contributing/upstream.md names each reproduction of tests/upstream, and code that is there."""

from __future__ import annotations

import re

from tests.support.processes import ROOT
from tests.upstream.environment import reproductions

PAGE = (ROOT / "docs/contributing/upstream.md").read_text()


def test_each_reproduction_has_one_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == reproductions()


def test_each_workaround_is_where_its_row_says() -> None:
    named = re.findall(r"`([\w/]+/\w+)` \(`([^`]+)`", PAGE)
    assert len(named) > len(reproductions())
    gone = [(module, text) for module, text in named if text not in (ROOT / f"celery_dlock/{module}.py").read_text()]
    assert gone == []
