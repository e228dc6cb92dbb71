"""Draw the recorded figures of the benchmarks as SVG: `make plots`.

Each `docs/images/benchmarks/NAME.json` becomes `NAME.svg`: horizontal bars, of several parts if the figures have parts.
The colours follow the light or dark scheme of the reader. A test compares the digest in the SVG with the JSON.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import re
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent.parent / "docs/images/benchmarks"
#: Each colour in the light scheme, and in the dark one: of the page, of text, of lines, and of the parts of a bar.
SCHEMES: Final = {
    "#ffffff": "#131416",
    "#1f2328": "#e6edf3",
    "#8c959f": "#6e7681",
    "#3a6ea5": "#6ca3dc",
    "#2d7d46": "#57ab6a",
    "#a5673a": "#dca36c",
}
PAGE, TEXT, LINE, *PARTS = SCHEMES
FONT: Final = "system-ui, sans-serif"
#: Inches: the width of a chart, the height of a bar and of what surrounds the bars.
WIDTH, BAR, FRAME = 8.0, 0.36, 0.7


def main() -> None:
    """Draw all charts."""
    for source in sorted(FOLDER.glob("*.json")):
        source.with_suffix(".svg").write_text(drawn(source.read_bytes()), encoding="utf-8")
        print(source.with_suffix(".svg"))


def drawn(source: bytes) -> str:
    """Return the SVG of the figures in a JSON file."""
    import matplotlib as mpl  # noqa: PLC0415  # only `make plots` installs it, and a test reads `digest`

    mpl.use("svg")
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "celery-dlock",
            "font.size": 10,
            "text.color": TEXT,
            "figure.facecolor": PAGE,
            "axes.facecolor": "none",
            "axes.edgecolor": LINE,
            "ytick.color": LINE,
            "ytick.labelcolor": TEXT,
        }
    )
    from matplotlib.figure import Figure  # noqa: PLC0415  # only `make plots` installs it

    data: dict[str, Any] = json.loads(source)
    bars = {label: bar if isinstance(bar, dict) else {"": bar} for label, bar in data["bars"].items()}
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    figure = Figure(figsize=(WIDTH, FRAME + BAR * len(bars)), layout="constrained")
    axes = figure.subplots()
    begins = dict.fromkeys(bars, 0.0)
    for part, colour in zip(parts, PARTS, strict=False):
        lengths = [bar.get(part, 0.0) for bar in bars.values()]
        axes.barh(list(bars), lengths, left=list(begins.values()), color=colour, label=part, height=0.65)
        begins = {label: begins[label] + length for label, length in zip(bars, lengths, strict=True)}
    for label, end in begins.items():
        axes.annotate(f"{end:g}", (end, label), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_title(data["title"], loc="left", fontsize=11)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(bottom=False, labelbottom=False)  # each bar says its length
    if len(parts) > 1:
        figure.legend(loc="outside lower center", ncols=len(parts), frameon=False)
    with io.StringIO() as written:
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        return _finished(written.getvalue(), source, data, begins)


def _finished(svg: str, source: bytes, data: dict[str, Any], bars: dict[str, float]) -> str:
    """Return the SVG with a description for screen readers, both colour schemes and the digest of its figures."""
    described = f"{data['title']}: " + "; ".join(f"{label} {end:g}" for label, end in bars.items())
    dark = "\n".join(
        f'    [style*="{name}: {light}"] {{ {name}: {other} !important }}'
        for light, other in SCHEMES.items()
        for name in ("fill", "stroke")
    )
    head = (
        f" <title>{html.escape(data['title'])}</title>\n <desc>{html.escape(described)}</desc>\n"
        f" <!-- {digest(source)} of the figures -->\n"
        f" <style>\n  @media (prefers-color-scheme: dark) {{\n{dark}\n  }}\n </style>\n"
    )
    begin = svg.index(">", svg.index("<svg")) + 2
    body = re.sub(r"\s*<metadata>.*</metadata>", "", svg[begin:], flags=re.DOTALL)
    body = re.sub(r"font-family: [^;]*;", f"font-family: {FONT};", body)
    body = "\n".join(line.rstrip() for line in body.splitlines())
    return svg[svg.index("<svg") : begin].replace("<svg", '<svg role="img"', 1) + head + body + "\n"


def digest(source: bytes) -> str:
    """Return the digest of a JSON file, which its SVG names."""
    return f"SHA-256 {hashlib.sha256(source).hexdigest()[:16]}"


if __name__ == "__main__":
    main()
