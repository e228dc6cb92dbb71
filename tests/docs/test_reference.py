"""docs/reference has the options and the settings as the code describes them."""

import re
import runpy
from dataclasses import fields
from typing import Any

import pytest
from celery.utils.imports import symbol_by_name

from celery_dlock.store.holder_model import Holder
from tests.support.processes import ROOT

TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/reference.py"))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("OPTIONS", "options"),
        ("SETTINGS_PAGE", "settings"),
        ("METRICS_PAGE", "metrics"),
        ("SCRIPTS_PAGE", "scripts"),
        ("CLI_PAGE", "command_line"),
    ],
)
def test_reference_page_is_what_the_code_says(page, text):
    written = TOOL[page].read_text(encoding="utf-8")
    assert written == TOOL["updated"](written, TOOL[text]()), "run `make reference`"


def test_page_on_locks_lists_the_fields_of_a_holder():
    page = (ROOT / "docs/how-to/lock-code-outside-tasks.md").read_text(encoding="utf-8")
    table = page.partition("A holder has these fields:")[2].partition("\n\nEvery")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    assert named == {field.name for field in fields(Holder)}


def test_name_on_the_api_page_can_be_imported():
    """`make docs` needs an environment of its own, so this finds a moved class sooner."""
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    named = re.findall(r"\.\. auto(?:class|exception|function):: ([\w.]+)", page)
    assert len(named) > 10
    for name in named:
        symbol_by_name(name.rpartition(".")[0] + ":" + name.rpartition(".")[2])
