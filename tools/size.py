"""Count the size of celery-dlock: code lines, options, settings, words of documentation (`make size`).

A code line has code. Docstrings, comments and blank lines do not count, in Python and in Lua.
A word is what stands between two spaces of a Markdown file, tables and code blocks included.
`--check` compares the documentation with its word limits instead (`make docs`).
"""

from __future__ import annotations

import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from celery_dlock.config.settings_table import SETTINGS
from celery_dlock.options.lock_options import LockOptions

ROOT: Final = Path(__file__).resolve().parent.parent
#: Documentation of contributors; all other pages are for users.
CONTRIBUTORS: Final = ("docs/contributing", "CONTRIBUTING.md")
#: Word limits. "Users" are all pages that are not for contributors.
ALL_LIMIT: Final = 50_000
USERS_LIMIT: Final = 36_000
GUIDE_LIMIT: Final = 2_500
HOW_TO_AVERAGE_LIMIT: Final = 500
HOW_TO_LIMIT: Final = 900

_NO_CODE: Final = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def python_lines(source: str) -> int:
    """Return the number of code lines of a Python module."""
    lines: set[int] = set()
    begins = True  # whether the next token begins a statement: a string there that ends the statement is a docstring
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type != tokenize.NL]
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        if token.type in _NO_CODE:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        ends = after.type in (tokenize.NEWLINE, tokenize.COMMENT, tokenize.ENDMARKER)
        if not (begins and token.type == tokenize.STRING and ends):
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(lines)


def lua_lines(source: str) -> int:
    """Return the number of code lines of a Lua script, which has no block comments."""
    return sum(1 for line in source.splitlines() if line.strip() and not line.lstrip().startswith("--"))


def words(paths: Iterable[Path]) -> int:
    """Return the number of words in these files."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def pages() -> list[Path]:
    """Return the Markdown files of the project."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("example_project/**/*.md")]
    return sorted(path for path in found if path.name != "README.zh-CN.md")


def for_users(every: Iterable[Path]) -> list[Path]:
    """Return the pages that are not for contributors."""
    return [path for path in every if not str(path.relative_to(ROOT)).startswith(CONTRIBUTORS)]


def over_limit() -> list[str]:
    """Return one error per word limit that the documentation exceeds."""
    every = pages()
    how_to = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/how-to/*.md"))
    checks = [
        ("documentation", words(every), ALL_LIMIT),
        ("documentation for users", words(for_users(every)), USERS_LIMIT),
        ("docs/guide.md", words([ROOT / "docs/guide.md"]), GUIDE_LIMIT),
        ("docs/how-to, average page", round(words(ROOT / name for name in how_to) / len(how_to)), HOW_TO_AVERAGE_LIMIT),
        *((name, words([ROOT / name]), HOW_TO_LIMIT) for name in how_to),
    ]
    return [f"{what}: {number:,} words, limit {limit:,}" for what, number, limit in checks if number > limit]


def main() -> int:
    if "--check" in sys.argv[1:]:
        errors = over_limit()
        print("\n".join(errors) or "documentation: within its word limits")
        return 1 if errors else 0
    modules, scripts = ROOT.glob("celery_dlock/**/*.py"), ROOT.glob("celery_dlock/**/*.lua")
    every = pages()
    rows = [
        ("code lines of celery_dlock, Python", sum(python_lines(path.read_text(encoding="utf-8")) for path in modules)),
        ("code lines of celery_dlock, Lua", sum(lua_lines(path.read_text(encoding="utf-8")) for path in scripts)),
        ("options of a task", len(LockOptions.__dataclass_fields__)),
        ("settings of an app", len(SETTINGS)),
        ("words of documentation", words(every)),
        ("words for users", words(for_users(every))),
    ]
    for what, number in rows:
        print(f"{number:>8,}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
