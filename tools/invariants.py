"""Write docs/contributing/invariants.md: each invariant with the tests that hold it.

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

Each sentence is an invariant or a guarantee of celery-dlock, followed by the tests that hold it.
A test names its invariants by `@pytest.mark.invariant("slug")`.
The test suite fails if an invariant has no test.
"""


class Held(NamedTuple):
    """A test and one invariant that it holds."""

    slug: str
    path: str
    test: str


def marked(root: Path = ROOT) -> list[Held]:
    """Return every mark of every test module, by file and line."""
    return [held for path in sorted(root.glob("tests/**/test_*.py")) for held in _marked_in(path, root)]


def _marked_in(path: Path, root: Path) -> Iterator[Held]:
    source = path.read_text(encoding="utf-8")
    if "mark.invariant(" not in source:
        return
    shown = path.relative_to(root).as_posix()
    for node in ast.parse(source).body:
        tests = [(node, "")]
        if isinstance(node, ast.ClassDef):
            tests += [(child, f"{node.name}::") for child in node.body if isinstance(child, ast.FunctionDef)]
        for each, prefix in tests:
            if isinstance(each, ast.ClassDef | ast.FunctionDef):
                yield from (Held(slug, shown, prefix + each.name) for slug in _slugs(each))


def _slugs(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.invariant":
            yield from (ast.literal_eval(argument) for argument in decorator.args)


def page(held: list[Held]) -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for section, invariants in INVARIANTS.items():
        parts.append(f"\n## {section}\n")
        for slug, sentence in invariants.items():
            rows = [f"| `{each.path}` | `{each.test}` |\n" for each in held if each.slug == slug]
            parts.append(f"\n### {slug}\n\n{sentence}\n\n| file | test |\n| --- | --- |\n{''.join(rows)}")
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
