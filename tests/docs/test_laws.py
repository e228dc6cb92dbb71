"""docs/architecture.md says of each law which test states it; this says that those tests exist."""

import ast
import re

from tests.processes import ROOT

NAMED = re.compile(r"`T/([\w/]+\.py)::([\w:]+)`")


def defined(path: str) -> set[str]:
    """Every test of a file, as pytest names it."""
    tree = ast.parse((ROOT / "tests" / path).read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{child.name}" for child in node.body if isinstance(child, ast.FunctionDef)}
    return found


def test_every_test_that_the_table_of_laws_names_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 50
    assert [f"{path}::{name}" for path, name in named if name not in defined(path)] == []
