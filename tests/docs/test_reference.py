"""docs/reference has the options and the settings as the code describes them."""

import re
import runpy
from dataclasses import fields
from typing import Any

import pytest
from celery.utils.imports import symbol_by_name

from celery_dlock.store.holder_model import Holder
from tests.support.processes import ROOT

EXTRAS_PAGE = ROOT / "docs/reference/supported-versions.md"
EXTRA = re.compile(r"celery-dlock\[([\w,]+)\]")
PAGES = sorted({ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("example_project/**/*.md")})
NAMING_EXTRAS = [page for page in PAGES if EXTRA.search(page.read_text(encoding="utf-8"))]
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/reference.py"))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("OPTIONS_PAGE", "options"),
        ("SETTINGS_PAGE", "settings"),
        ("METRICS_PAGE", "metrics"),
        ("SCRIPTS_PAGE", "scripts"),
        ("CLI_PAGE", "command_line"),
    ],
)
def test_reference_page_is_what_the_code_says(page, text):
    written = TOOL[page].read_text(encoding="utf-8")
    assert written == TOOL["updated"](written, TOOL[text]()), "run `make reference`"


def test_json_schema_is_that_of_the_code():
    assert TOOL["SCHEMA_FILE"].read_text(encoding="utf-8") == TOOL["schema"](), "run `make reference`"


def test_page_on_locks_lists_the_fields_of_a_holder():
    page = (ROOT / "docs/how-to/lock-code-outside-tasks.md").read_text(encoding="utf-8")
    table = page.partition("A holder has these fields:")[2].partition("\n\nA task")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    assert named == {field.name for field in fields(Holder)}


def extras() -> dict[str, set[str]]:
    """Return the extras of pyproject.toml with their requirements."""
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]\n")[2]
    lines = section.partition("\n[")[0].splitlines()
    return {line.partition(" = ")[0]: set(re.findall(r'"([^"]+)"', line)) for line in lines if " = [" in line}


def test_table_of_extras_is_that_of_the_package():
    table = EXTRAS_PAGE.read_text(encoding="utf-8").partition("\n## Extras\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    written = {extra.strip("| `"): set(re.findall(r"`([^`]+)`", installs)) for extra, installs, _ in rows}
    assert written == extras()
    assert len(written) > 3


@pytest.mark.parametrize("page", NAMING_EXTRAS, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_that_names_an_extra_links_to_the_table_of_extras(page):
    text = page.read_text(encoding="utf-8")
    assert page == EXTRAS_PAGE or f"{EXTRAS_PAGE.name}#extras)" in text
    assert {extra for named in EXTRA.findall(text) for extra in named.split(",")} <= set(extras())


def test_code_names_only_extras_of_the_package():
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("celery_dlock/**/*.py")]
    named = {extra for text in texts for group in EXTRA.findall(text) for extra in group.split(",")}
    assert {"web", "watch"} <= named <= set(extras())


def test_name_on_the_api_page_can_be_imported():
    """`make docs` needs an environment of its own, so this finds a moved class sooner."""
    page = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    named = re.findall(r"\.\. auto(?:class|exception|function):: ([\w.]+)", page)
    assert len(named) > 10
    for name in named:
        symbol_by_name(name.rpartition(".")[0] + ":" + name.rpartition(".")[2])
