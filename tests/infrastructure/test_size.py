import runpy
from typing import Any

import pytest

from tests.support.processes import ROOT

TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/size.py"))


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Text.\n\nMore text.\n"""\n\nx = 1  # why\n', 1),
        ("# why\nx = 1\n\n\ny = 2\n", 2),
        ('def f():\n    """Text."""\n    return 1\n', 2),
        ('class A:\n    """Text."""\n\n    #: why\n    x: int = 1\n    """Text."""\n', 2),
        ('x = f(\n    "text",\n    # why\n    1,\n)\n', 4),
        ('x = """\na\n\nb\n"""\n', 5),
        ('f("text")\n"text".strip()\n', 2),
    ],
)
def test_python_lines_without_docstrings_comments_and_blanks_are_counted(source: str, lines: int) -> None:
    assert TOOL["python_lines"](source) == lines


def test_lua_lines_without_comments_and_blanks_are_counted() -> None:
    assert TOOL["lua_lines"]("-- head\nlocal x = 1  -- why\n\n  -- why\nif x then\nend\n") == 3
