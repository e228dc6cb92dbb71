"""docs/reference has the options and the settings as the code describes them."""

import re
import runpy
from typing import Any

import pytest
from celery.utils.imports import symbol_by_name

from tests.support.processes import ROOT

TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/reference.py"))


@pytest.mark.parametrize(
    ("page", "text"),
    [("OPTIONS", "options"), ("SETTINGS_PAGE", "settings"), ("SCRIPTS_PAGE", "scripts"), ("CLI_PAGE", "command_line")],
)
def test_reference_page_is_what_the_code_says(page, text):
    written = TOOL[page].read_text(encoding="utf-8")
    assert written == TOOL["updated"](written, TOOL[text]()), "run `make reference`"


def test_name_on_the_api_page_can_be_imported():
    """`make docs` needs an environment of its own, so this finds a moved class sooner."""
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    named = re.findall(r"\.\. auto(?:class|exception|function):: ([\w.]+)", page)
    assert len(named) > 10
    for name in named:
        symbol_by_name(name.rpartition(".")[0] + ":" + name.rpartition(".")[2])
