"""The plots of the benchmarks show the committed figures, and the cost page shows every plot."""

import re
import runpy
from typing import Any

import pytest

from tests.support.processes import ROOT

TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools/plots.py"))
FIGURES = sorted(TOOL["FOLDER"].glob("*.json"))


@pytest.mark.parametrize("source", FIGURES, ids=lambda source: source.stem)
def test_plot_names_the_digest_of_its_figures(source):
    drawn = source.with_suffix(".svg").read_text(encoding="utf-8")
    assert TOOL["digest"](source.read_bytes()) in drawn, "run `make plots`"


def test_cost_page_shows_every_plot():
    page = (ROOT / "docs/explanation/benchmarks.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(\.\./images/benchmarks/(\w+)\.svg\)", page)
    assert sorted(shown) == [source.stem for source in FIGURES]
