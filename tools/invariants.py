"""Write docs/contributing/invariants.md: each invariant with the files of the tests that hold it.

    tools/invariants.py             write the page
    tools/invariants.py --check     end with 1 if the page is not what the tests say

The invariants are in `tests/invariants.py`. A test names its own by `@pytest.mark.invariant("slug")`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs/contributing/invariants.md"
sys.path.insert(0, str(ROOT))

from tests.invariants import INVARIANTS  # noqa: E402  # the path above has to come first

HEAD: Final = """# Invariants

<!-- Made by tools/invariants.py. Edit tests/invariants.py or the marks of the tests, then run `make invariants`. -->

Each paragraph is an invariant or a guarantee of celery-dlock, followed by the files of `tests/` that hold it.
A test names its invariants by `@pytest.mark.invariant("slug")`, also on its class or in `pytestmark`.
The test suite fails if an invariant has no test.
"""


class Held(NamedTuple):
    """A test and one invariant that it holds. A class or a module that is marked stands for its tests."""

    slug: str
    path: str
    test: str


def marked(root: Path = ROOT) -> list[Held]:
    """Return every test with every invariant that it holds, by file and line."""
    return [held for path in sorted(root.glob("tests/**/test_*.py")) for held in _marked_in(path, root)]


def _marked_in(path: Path, root: Path) -> Iterator[Held]:
    source = path.read_text(encoding="utf-8")
    if "mark.invariant(" not in source:
        return
    shown = path.relative_to(root).as_posix()
    body = ast.parse(source).body
    of_module = [slug for node in body for slug in _slugs(_module_marks(node))]
    for name, of_test in _tests(body):
        yield from (Held(slug, shown, name) for slug in dict.fromkeys([*of_module, *of_test]))


def _tests(body: list[ast.stmt]) -> Iterator[tuple[str, list[str]]]:
    """Yield every test function of a module, with the slugs of its own marks and of its class."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            of_class = [*_slugs(node.decorator_list)]
            yield from ((f"{node.name}::{name}", of_class + slugs) for name, slugs in _tests(node.body))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, [*_slugs(node.decorator_list)]


def _module_marks(node: ast.stmt) -> list[ast.expr]:
    """Return the marks of `pytestmark = …`, which is one mark or a list of them."""
    if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "pytestmark":
        return []
    return node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]


def _slugs(marks: list[ast.expr]) -> Iterator[str]:
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.invariant":
            yield from (ast.literal_eval(argument) for argument in mark.args)


def page(held: list[Held]) -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for section, invariants in INVARIANTS.items():
        parts.append(f"\n## {section}\n")
        for slug, sentence in invariants.items():
            files = dict.fromkeys(each.path.removeprefix("tests/") for each in held if each.slug == slug)
            listed = ", ".join(f"`{file}`" for file in files)
            parts.append(f"\n### {slug}\n\n{sentence}\n\n{listed}\n")
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    made = page(marked())
    if arguments == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == made:
            return 0
        sys.stderr.write(f"{PAGE.relative_to(ROOT)} is stale: run `make invariants`\n")
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
