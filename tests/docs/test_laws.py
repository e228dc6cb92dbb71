"""Every test that a table of the documentation names exists."""

import ast
import re

import pytest

from tests.support.processes import ROOT

NAMED = re.compile(r"`([TFW])/([\w/]+\.py)::([\w:]+)`")
FOLDERS = {"T": "", "F": "faults/", "W": "worker/"}


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


@pytest.mark.parametrize(
    ("page", "least"),
    [("contributing/architecture.md", 50), ("explanation/guarantees.md", 45), ("explanation/broker-faults.md", 20)],
)
def test_every_test_that_a_table_names_exists(page: str, least: int) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(named) > least
    missing = [f"{path}::{name}" for folder, path, name in named if name not in defined(FOLDERS[folder] + path)]
    assert missing == []
