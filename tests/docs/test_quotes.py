"""Quotes in the documentation exist: log and error texts, files and modules of this repository."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT

TROUBLESHOOTING = ROOT / "docs/how-to/troubleshooting.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
#: A row of a table whose first cell begins with a quoted text.
ROW = re.compile(r"^\| `([^`]+)`", re.MULTILINE)
#: In a page `…` is a part that varies; in the code it is a placeholder of `%` or `str.format`.
VARIES = re.compile(r"…|\.\.\.")
PLACEHOLDER = re.compile(r"%[-.\d]*[a-z]|\{[^{}]*\}")
FILE = re.compile(r"\b(?:benchmarks|celery_dlock|chaos|example_project|tests|tools)/[\w/.-]*\w\.(?:py|lua)\b")
MODULE = re.compile(r"python -m ((?:benchmarks|chaos|example_project|tests)[\w.]*)")


def quoted() -> list[str]:
    """Return the texts of the first column; those of options and calls are no messages."""
    return [text for text in ROW.findall(TROUBLESHOOTING.read_text()) if " " in text and "dlock=" not in text]


def literals() -> Iterator[str]:
    """Yield every string of the package, with its placeholders as line ends."""
    for path in (ROOT / "celery_dlock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield PLACEHOLDER.sub("\n", node.value)


def known(part: str, texts: str) -> bool:
    """Return whether the code has this text, as one string or as two that it joins."""
    cuts = [(part[:at], part[at:]) for at in range(4, len(part) - 3)]
    return part in texts or any(head in texts and tail in texts for head, tail in cuts)


@pytest.fixture(scope="module")
def texts() -> str:
    return "\n".join(literals())


def test_troubleshooting_quotes_many_messages() -> None:
    assert len(quoted()) > 50


@pytest.mark.parametrize("text", quoted())
def test_quoted_message_is_in_the_code(text: str, texts: str) -> None:
    parts = [part.strip(" :[]()") for part in VARIES.split(text)]
    assert [part for part in parts if not known(part, texts)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    named = [*FILE.findall(text), *(f"{name.replace('.', '/')}.py" for name in MODULE.findall(text))]
    packages = {name for name in named if (ROOT / name.removesuffix(".py") / "__init__.py").exists()}
    assert [name for name in named if name not in packages and not (ROOT / name).exists()] == []
