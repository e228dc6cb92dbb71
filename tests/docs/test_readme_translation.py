"""README.zh-CN.md says what README.md says: equal code blocks, and in each section the same links and rows."""

import re

import pytest

from tests.support.processes import ROOT

ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)]+)\)")


def test_each_readme_links_the_other_in_its_first_line() -> None:
    assert LINK.findall(ENGLISH.splitlines()[0]) == ["README.zh-CN.md"]
    assert LINK.findall(CHINESE.splitlines()[0]) == ["README.md"]


def test_code_blocks_of_both_are_equal() -> None:
    assert len(BLOCK.findall(ENGLISH)) > 3
    assert BLOCK.findall(CHINESE) == BLOCK.findall(ENGLISH)


@pytest.mark.parametrize("section", range(1, ENGLISH.count("\n## ") + 1))
def test_sections_have_the_same_links_and_rows(section: int) -> None:
    assert CHINESE.count("\n## ") == ENGLISH.count("\n## ")
    english, chinese = (text.split("\n## ")[section] for text in (ENGLISH, CHINESE))
    assert sorted(LINK.findall(chinese)) == sorted(LINK.findall(english))
    assert chinese.count("\n|") == english.count("\n|")
