"""The figures of the last recorded run, which `make plots` draws for docs/explanation/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone

from tests.support.processes import ROOT

FOLDER = ROOT / "docs/images/benchmarks"

#: The value of a bar, or those of its parts.
Bar = float | Mapping[str, float]


def record(chart: str, title: str, bars: Mapping[str, Bar], *, command: str) -> None:
    """Write the bars of one chart to ``docs/images/benchmarks``.

    Args:
        chart: The name of its file, without a suffix.
        title: What the bars are, with the unit.
        bars: The bars from top to bottom, by label.
        command: The command line that measured them.
    """
    data = {
        "title": title,
        "command": command,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "bars": {label: _rounded(bar) for label, bar in bars.items()},
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{chart}.json").write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _rounded(bar: Bar) -> object:
    """Return the figures with three digits, so that a difference between two runs can be read."""
    if isinstance(bar, Mapping):
        return {part: _rounded(value) for part, value in bar.items()}
    return float(f"{bar:.3g}")
