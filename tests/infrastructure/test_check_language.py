import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT

TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/check_language.py"))
LONG = " ".join(["word"] * 26) + "."


def findings(tmp_path: Path, name: str, source: str) -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(source)
    return [(each.line, each.rule) for each in TOOL["check"](path, f"celery_dlock/{name}")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Who asks."""', [(1, "opener")]),
        ('def f():\n    """Whether it runs."""', []),
        ('LIMIT = 1\n"""Where it ends."""', [(2, "opener")]),
        ("x = 1  # a keeper", [(1, "word")]),
        ("x = 1  # `keeper` is a name in backticks", []),
        ('x = "nobody answered"', [(1, "word")]),
        (f"# {LONG}", [(1, "sentence")]),
        (f'"""{LONG[:60]}\n{LONG[60:]}"""', [(1, "sentence")]),
        (f'x = "{LONG}"', []),
        ("# Short sentences. " * 20, []),
        (f"def test_{'x' * 76}(): ...", [(1, "test-name")]),
        (f"def test_{'x' * 75}(): ...", []),
        ("x = 1\n" * 300, []),
        ("x = 1\n" * 600, []),
        ("x = 1\n" * 601, [(1, "length")]),
    ],
)
def test_python_source_yields_expected_findings(tmp_path: Path, source: str, expected: list[tuple[int, str]]) -> None:
    assert findings(tmp_path, "module.py", source) == expected


def test_lua_comments_yield_findings_and_code_does_not(tmp_path: Path) -> None:
    source = f"-- {LONG[:60]}\n-- {LONG[60:]}\nlocal keeper = 1 -- the keeper\nreturn 'nobody'\n"
    assert findings(tmp_path, "script.lua", source) == [(1, "sentence"), (3, "word")]


def test_markdown_prose_yields_findings_and_code_blocks_do_not(tmp_path: Path) -> None:
    source = (
        f"# Title\n\n```python\n# the keeper\n```\n\nThe `keeper`.\n- An item\n- {LONG}\n\n<!-- nobody -->\nNobody.\n"
    )
    assert findings(tmp_path, "page.md", source) == [(9, "sentence"), (12, "word")]


def test_file_moved_inside_its_package_keeps_its_group() -> None:
    group = TOOL["group"]
    assert group("celery_dlock/store/a.py") == group("celery_dlock/store/redis/b.py") == "celery_dlock/store"
    assert group("docs/howto/a.md") == "docs"
    assert group("README.md") == "README.md"


def test_baseline_written_and_read_is_unchanged_without_its_zeros() -> None:
    allowed = Counter({("docs", "word"): 2, ("docs", "opener"): 0})
    assert TOOL["read_baseline"](TOOL["written_baseline"](allowed)) == Counter({("docs", "word"): 2})


def test_more_findings_than_the_baseline_allows_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.txt"
    monkeypatch.setitem(TOOL["main"].__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(TOOL["main"].__globals__, "BASELINE", baseline)
    baseline.write_text("README.md word 2\n")
    (tmp_path / "README.md").write_text("Nobody. Nobody.")
    assert TOOL["main"]([]) == 0
    (tmp_path / "README.md").write_text("Nobody.")
    assert TOOL["main"](["--update"]) == 0
    assert TOOL["read_baseline"](baseline.read_text()) == {("README.md", "word"): 1}
    (tmp_path / "README.md").write_text("Nobody. Nobody.")
    assert TOOL["main"](["--update"]) == 1
    assert "README.md: 2 findings of 'word', allowed are 1" in capsys.readouterr().out
    assert TOOL["read_baseline"](baseline.read_text()) == {("README.md", "word"): 1}
