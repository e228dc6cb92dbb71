"""Check the language of the code and the docs: `make language`, part of `make lint`.

Four rules for texts: how a docstring begins, forbidden words, sentences of at most 25 words, test names of
at most 80 characters. One rule for modules of celery_dlock: at most 600 lines.
`tools/language-baseline.txt` allows each package as many findings as it had; more are an error.

    tools/check_language.py                  compare all files with the baseline
    tools/check_language.py PATH...          list every finding in these files and folders
    tools/check_language.py --update         lower the baseline to today's counts; it never raises one
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
BASELINE: Final = ROOT / "tools/language-baseline.txt"
FOLDERS: Final = ("benchmarks", "celery_dlock", "chaos", "docs", "example_project", "tests", "tools")
MOST_WORDS, LONGEST_NAME, MOST_SHOWN = 25, 80, 10
MOST_LINES: Final = 600  # of a module of celery_dlock

_OPENER: Final = re.compile(r"\W*(?:who|what|which|where|when|whoever|whom|whose|how)\b", re.IGNORECASE)
#: Pronouns that hide the actor, references without a target, and the terms that the glossary replaced.
_BANNED: Final = re.compile(
    r"\b(?:nobody|no one|somebody|someone|anybody|everybody|whoever|whom|whomever|those who|of ours|likewise|as above"
    r"|as it is(?=[,.;:)]|$)|such an? one|it is said|whence|whereof|thereof|wherein"
    r"|(?:is|are|was|were|be|been|being|not) told"
    r"|(?:is|are|was|were|be|been|being|not|never) heard|unheard|hears of|heard of|keepers?|lockers?|elders?|heirs?"
    r"|twins?|parcels?|doors?|wakers?|bells?|errands?|nursery|probation|in office|oust(?:s|ed|ing)?|bur(?:y|ied|ies)"
    r"|strangers?|takes? (?:its|a) turn|(?:its|lost|loses?|lose) (?:a )?turn|com(?:es?|ing) (?:back|again)"
    r"|came (?:back|again)|g(?:ave|ives?|iven|iving) back|hand(?:s|ed|ing)? over|hand-?overs?|stands? (?:on|in) the"
    r"|on the board|is not allowed; allowed)\b",
    re.IGNORECASE,
)
_CODE: Final = re.compile(r":[\w:]+:`[^`]*`|``[^`]*``|`[^`]*`|https?://\S+")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ABBREVIATION: Final = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])[\"')*]*\s+|\s\|\s")
_WORD: Final = re.compile(r"[A-Za-z0-9][\w'./-]*")
#: A line that begins a paragraph: a list item, `name: text`, a heading, a row of a table or of aligned columns.
_ITEM: Final = re.compile(
    r"\s*(?:[-*+#>|]|\d+\.? |\.\. |[*\w.`]+(?: \([^)]*\))?: |[A-Z]\w+:$|KEYS|ARGV|Result)|.*\S {2,}\S"
)


class Text(NamedTuple):
    """Text of a file that begins at a line; `kind` is "docstring", "string" or "prose"."""

    line: int
    kind: str
    text: str


class Finding(NamedTuple):
    """A sentence, word or name that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def check(path: Path, shown: str) -> Iterator[Finding]:
    """Yield the findings of one file; `shown` is its path in them."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tree = ast.parse(source)
        yield from (Finding(shown, *each) for each in _long_names(tree))
        if shown.startswith("celery_dlock/"):
            yield from (Finding(shown, *each) for each in _long_module(len(source.splitlines())))
        texts: Iterable[Text] = itertools.chain(
            _docstrings(tree), _strings(tree, shown), _blocks(_python_comments(source))
        )
    elif path.suffix == ".md":
        texts = _markdown(source)
    else:
        texts = _blocks(_lua_comments(source))
    for text in texts:
        yield from (Finding(shown, *each) for each in _findings(text))


def _findings(text: Text) -> Iterator[tuple[int, str, str]]:
    if text.kind == "docstring" and _OPENER.match(text.text):
        yield text.line, "opener", text.text.splitlines()[0]
    for line, paragraph in _paragraphs(text):
        plain = _CODE.sub("X", _LINK.sub(r"\1", paragraph))
        for banned in _BANNED.finditer(plain):
            yield line, "word", f"{banned[0]!r} in: {paragraph}"
        for sentence in _SENTENCE_END.split(_ABBREVIATION.sub(r"\1", plain)):
            if text.kind != "string" and (words := len(_WORD.findall(sentence))) > MOST_WORDS:
                yield line, "sentence", f"{words} words: {sentence}"


def _long_names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for each in functions:
        if each.name.startswith("test_") and len(each.name) > LONGEST_NAME:
            yield each.lineno, "test-name", f"{len(each.name)} characters: {each.name}"


def _long_module(lines: int) -> Iterator[tuple[int, str, str]]:
    if lines > MOST_LINES:
        yield 1, "length", f"{lines} lines, allowed are {MOST_LINES}: split the module"


def _docstrings(tree: ast.AST) -> Iterator[Text]:
    """Yield every string that is a statement: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(node.lineno, "docstring", inspect.cleandoc(node.value.value))


def _strings(tree: ast.AST, shown: str) -> Iterator[Text]:
    """Yield the strings of log and error texts; those of tests are data."""
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree) if not shown.startswith(("tests", "tools")) else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield Text(node.lineno, "string", node.value)


def _python_comments(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield the comments: line, column and text."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield *token.start, token.string.removeprefix("#").removeprefix(":")


def _lua_comments(source: str) -> Iterator[tuple[int, int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.search(r"(?:^|\s)--(?: |$)", line):
            yield number, found.start(), line[found.end() :]


def _blocks(comments: Iterable[tuple[int, int, str]]) -> Iterator[Text]:
    """Join the comments of successive lines that begin in one column."""
    start, last, lines = 0, (0, 0), list[str]()
    for number, column, text in comments:
        if lines and (number, column) != (last[0] + 1, last[1]):
            yield Text(start, "prose", "\n".join(lines))
            lines = []
        start, last = start if lines else number, (number, column)
        lines.append(re.sub(r"^ ?(?:noqa: [A-Z0-9, ]+|type: ignore\S*\s*|pragma: .*)(?:# )?", "", text))
    yield Text(start, "prose", "\n".join(lines))


def _markdown(source: str) -> Iterator[Text]:
    """Yield the prose; lines of code blocks and HTML comments become empty, so that line numbers stay."""
    prose = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1 *$|<!--.*?-->", _emptied, source, flags=re.DOTALL | re.MULTILINE)
    yield Text(1, "prose", prose)


def _emptied(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def _paragraphs(text: Text) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and list items, each on one line, with the number of its first line."""
    start, lines, literal = text.line, list[str](), False
    for number, line in enumerate([*text.text.splitlines(), ""], text.line):
        literal = literal and (not line.strip() or line.startswith("    "))
        if lines and (not line.strip() or literal or _ITEM.match(line)):
            yield start, " ".join(lines)
            literal = lines[-1].endswith("::") or literal
            lines = []
        if line.strip() and not literal:
            start = start if lines else number
            lines.append(line.strip())


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that the rules hold for."""
    for path in paths:
        found = path.rglob("*") if path.is_dir() else [path]
        yield from sorted(each for each in found if each.is_file() and each.suffix in (".py", ".lua", ".md"))


def everything(root: Path) -> Iterator[Finding]:
    """Yield the findings of all files of the project."""
    for path in files([*(root / folder for folder in FOLDERS), *sorted(root.glob("*.md"))]):
        yield from check(path, path.relative_to(root).as_posix())


def counts(findings: Iterable[Finding]) -> Counter[tuple[str, str]]:
    """Count per package and rule: a file that moves inside its package changes no count."""
    return Counter((group(finding.path), finding.rule) for finding in findings)


def group(path: str) -> str:
    """Return the package, the folder or the file of the root that `path` counts for."""
    parts = path.split("/")
    return "/".join(parts[: 2 if parts[0] == "celery_dlock" else 1])


def read_baseline(text: str) -> Counter[tuple[str, str]]:
    """Read the lines `group rule count`."""
    fields = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return Counter({(name, rule): int(count) for name, rule, count in fields})


def written_baseline(allowed: Counter[tuple[str, str]]) -> str:
    """Return the baseline's text."""
    lines = [f"{name} {rule} {count}" for (name, rule), count in sorted(allowed.items()) if count]
    return "\n".join(["# Made by tools/check_language.py --update, which only lowers a count.", *lines, ""])


def main(arguments: list[str]) -> int:
    """Run the tool; return its exit code."""
    if arguments and arguments != ["--update"]:
        found = [each for path in files(map(Path, arguments)) for each in check(path, str(path))]
        print(*found, f"{len(found)} findings", sep="\n")
        return bool(found)
    findings = list(everything(ROOT))
    now, allowed = counts(findings), read_baseline(BASELINE.read_text())
    grown = [key for key in sorted(now) if now[key] > allowed[key]]
    for name, rule in grown:
        mine = [each for each in findings if (group(each.path), each.rule) == (name, rule)]
        print(*mine[:MOST_SHOWN], sep="\n")
        print(f"{name}: {now[name, rule]} findings of {rule!r}, allowed are {allowed[name, rule]}: see CONTRIBUTING.md")
    if "--update" in arguments:
        BASELINE.write_text(written_baseline(now & allowed))
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
