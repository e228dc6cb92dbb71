"""Every invariant has a test, and docs/contributing/invariants.md lists the tests as they are."""

import runpy
from typing import Any

from tests.invariants import INVARIANTS
from tests.support.processes import ROOT

TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/invariants.py"))
MARKED = TOOL["marked"]()
SLUGS = [slug for section in INVARIANTS.values() for slug in section]


def test_slug_of_an_invariant_is_unique():
    assert len(SLUGS) == len(set(SLUGS))


def test_mark_of_a_test_names_a_known_invariant():
    assert [each for each in MARKED if each.slug not in SLUGS] == []


def test_invariant_has_a_test():
    assert set(SLUGS) - {each.slug for each in MARKED} == set()


def test_page_of_invariants_is_what_the_tests_say():
    text = TOOL["PAGE"].read_text(encoding="utf-8")
    assert text == TOOL["page"](MARKED), "run `make invariants`"


def test_module_without_the_mark_yields_no_row(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_b(): ...\n")
    assert TOOL["marked"](tmp_path) == []


def test_mark_of_a_class_or_module_counts_for_each_of_its_tests(tmp_path):
    (tmp_path / "tests").mkdir()
    mark = "pytest.mark.invariant"
    source = f"""pytestmark = [pytest.mark.core, {mark}("m")]
@{mark}("x", "y")
class TestC:
    @{mark}("z", "m")
    def test_d(self): ...
    def test_e(self): ...
    def help(self): ...
class Helper: ...
def test_f(): ...
"""
    (tmp_path / "tests/test_c.py").write_text(source)
    (tmp_path / "tests/test_g.py").write_text(f'pytestmark = {mark}("m")\ndef test_h(): ...\n')
    found = TOOL["marked"](tmp_path)
    assert [each.test for each in found if each.slug == "m"] == ["TestC::test_d", "TestC::test_e", "test_f", "test_h"]
    assert [(each.slug, each.test) for each in found if each.slug in "xyz"] == [
        ("x", "TestC::test_d"),
        ("y", "TestC::test_d"),
        ("z", "TestC::test_d"),
        ("x", "TestC::test_e"),
        ("y", "TestC::test_e"),
    ]
