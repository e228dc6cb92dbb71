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


CONTRIBUTING_PAGES = sorted(ROOT.glob("docs/contributing/*.md"))
PACKAGE = ROOT / "celery_dlock"
#: Where contributors' pages look for a file that they name: `scripts/` stands for `store/redis/scripts/`.
BASES = (PACKAGE, PACKAGE / "store/redis", ROOT, ROOT / "tests")
QUOTED_PATH = re.compile(r"`(\w+(?:/[\w.]+)+/?)`")
#: The names in a file that a page quotes behind it: "`task/policy` (`_wait_first`)".
QUOTED_NAMES = re.compile(r"`(\w+(?:/[\w.]+)*)` \(([^)]*`)[^`)]*\)")


def file_of(named: str) -> Path | None:
    """Return the file or folder that a contributors' page names, which leaves out `.py`."""
    places = (base / f"{named}{end}" for base in BASES for end in ("", ".py", "/__init__.py"))
    return next((place for place in places if place.exists()), None)


def quoted_paths(text: str) -> set[str]:
    """Return the quoted paths that begin with a package, or with a folder of the repository."""
    named = set(QUOTED_PATH.findall(text))
    return {path for path in named if any((base / path.partition("/")[0]).is_dir() for base in BASES)}


@pytest.mark.parametrize("page", CONTRIBUTING_PAGES, ids=lambda page: page.stem)
def test_path_in_contributing_page_exists(page: Path) -> None:
    assert [path for path in sorted(quoted_paths(page.read_text())) if file_of(path) is None] == []


@pytest.mark.parametrize("page", CONTRIBUTING_PAGES, ids=lambda page: page.stem)
def test_name_quoted_behind_a_file_is_in_it(page: Path) -> None:
    absent = []
    for path, names in QUOTED_NAMES.findall(page.read_text()):
        place = file_of(path)
        if place is not None and place.is_file():
            code = place.read_text()
            absent += [f"{path}: {name}" for name in re.findall(r"`([^`]+)`", names) if name not in code]
    assert absent == []


def test_table_of_decisions_names_a_file_in_each_row() -> None:
    page = (ROOT / "docs/contributing/architecture.md").read_text()
    table = page.partition("\n## Where is it decided?\n")[2].partition("\n## ")[0]
    first = [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ")][2:]
    named = [cell.split("`")[1] for cell in first if cell.startswith("`")]
    assert len(named) > 40
    assert [path for path in named if file_of(path) is None] == []
