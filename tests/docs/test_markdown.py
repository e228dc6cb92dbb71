"""Text of a page that Markdown does not show: an unknown HTML tag, and a cell beyond the columns of its table."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT

markdown_it = pytest.importorskip("markdown_it", reason="installed in the main lane only")

PAGES = sorted(page for pattern in ("*.md", "docs/**/*.md", "example_project/**/*.md") for page in ROOT.glob(pattern))


def hidden(text: str) -> Iterator[str]:
    """Yield the HTML of a Markdown text, without comments, and the rows that have more cells than their table."""
    for block in markdown_it.MarkdownIt("commonmark").enable("table").parse(text):
        for token in (block, *(block.children or ())):
            if token.type in ("html_block", "html_inline") and not token.content.strip().startswith("<!--"):
                yield token.content
        if block.type == "table_open":
            first, end = block.map
            head, *rows = text.splitlines()[first:end]
            yield from (row for row in rows if bars(row) > bars(head))


def bars(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_hides_no_text(page: Path) -> None:
    assert list(hidden(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("text", ["replaced by <id>", "| a |\n| --- |\n| `x | y` |"])
def test_hidden_text_is_found(text: str) -> None:
    assert list(hidden(text))


def test_generated_text_keeps_its_angle_brackets() -> None:
    """A docstring is reStructuredText, where `<id>` is plain text."""
    tool = runpy.run_path(str(ROOT / "tools/reference.py"))
    text = 'REVOKED ("replaced by <id>"), `dlock-<uid>`, a <= b'
    page = tool["updated"](f"{tool['BEGIN']}{tool['END']}", text)
    assert list(hidden(page)) == []
    shown = markdown_it.MarkdownIt("commonmark").render(page)
    assert "replaced by &lt;id&gt;" in shown
    assert "<code>dlock-&lt;uid&gt;</code>, a &lt;= b" in shown
