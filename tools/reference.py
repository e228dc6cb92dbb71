"""Write options, settings, scripts, the command line and its JSON schema into the documentation: `make reference`.

Options are the fields of `LockOptions` with their docstrings, settings the entries of `SETTINGS`. A script is described
by the header of its Lua file. Each is written down there once. Text of a page outside the two marks is written by hand.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import click  # noqa: E402  # after the path to the package
from cli_schema import schema  # noqa: E402

from celery_dlock.cli import dlock  # noqa: E402
from celery_dlock.config.settings_table import SETTINGS  # noqa: E402  # after the path to it
from celery_dlock.counters.catalog import METRICS  # noqa: E402
from celery_dlock.errors import InvalidLockOptions  # noqa: E402
from celery_dlock.options.lock_options import OPTIONS, UNSET  # noqa: E402
from celery_dlock.options.option import Chapter  # noqa: E402

SOURCE: Final = ROOT / "celery_dlock/options/lock_options.py"
OPTIONS_PAGE: Final = ROOT / "docs/reference/options.md"
SETTINGS_PAGE: Final = ROOT / "docs/reference/settings.md"
METRICS_PAGE: Final = ROOT / "docs/reference/metrics.md"
SCRIPTS_PAGE: Final = ROOT / "docs/contributing/wire-format.md"
CLI_PAGE: Final = ROOT / "docs/reference/command-line.md"
SCHEMA_FILE: Final = ROOT / "docs/reference/cli-output.schema.json"
SCRIPTS: Final = ROOT / "celery_dlock/store/redis/scripts"
BEGIN: Final = "<!-- Made by tools/reference.py. Edit the texts in celery_dlock/, then run `make reference`. -->"
END: Final = "<!-- The end of what tools/reference.py made. -->"
#: An option with the same text in this many commands is written once.
SHARED: Final = 4

#: The words for the types of options. Any other type is a text, whose values the option's description names.
TYPES: Final = {
    "Key": "a template, names of arguments, a function, `None`",
    "Seconds": "seconds",
    "tuple[Seconds, Seconds]": "a pair of seconds",
    "int": "a whole number",
    "bool": "`True`, `False`",
    "None": "`None`",
    "Any": "any",
}

HOW_TO, EXPLANATION = "../how-to", "../explanation"
SEE: Final = {
    "dlock_url": f"{HOW_TO}/connect-to-the-lock-store.md",
    "dlock_transport_options": f"{HOW_TO}/connect-to-the-lock-store.md",
    "dlock_durability": f"{HOW_TO}/survive-a-failover.md",
    "dlock_quarantine": f"{HOW_TO}/survive-a-failover.md",
    "dlock_call_options": f"{EXPLANATION}/security.md#what-a-message-may-choose",
    "dlock_run_dir": f"{HOW_TO}/run-in-production.md#the-run-directory",
    "dlock_enabled": f"{HOW_TO}/test-your-tasks.md",
    "dlock_broker": f"{HOW_TO}/set-up-the-broker.md#change-the-brokers-url",
    "dlock_metrics_port": f"{HOW_TO}/monitor-and-alert.md#prometheus",
}


#: Options with a page of their own, beside that of their chapter.
MORE: Final = {
    "limit": ("run at most N calls at a time", f"{HOW_TO}/run-at-most-n-at-a-time.md"),
    "queue_limit": ("process calls in order", f"{HOW_TO}/process-calls-in-order.md"),
    "stop": ("replace a running call", f"{HOW_TO}/replace-a-running-call.md"),
    "debounce": ("debounce", f"{HOW_TO}/cooldown-throttle-debounce-once.md#debounce"),
    "keep_on_retry": (
        "options that change a lock's life",
        f"{EXPLANATION}/how-a-lock-lives.md#options-that-change-a-locks-life",
    ),
    "once_per": ("run a task once", f"{HOW_TO}/run-a-task-once.md"),
    "misfire_grace": ("run several beats", f"{HOW_TO}/run-several-beats.md"),
}


def main() -> None:
    """Write the pages."""
    pages = (
        (OPTIONS_PAGE, options()),
        (SETTINGS_PAGE, settings()),
        (METRICS_PAGE, metrics()),
        (SCRIPTS_PAGE, scripts()),
        (CLI_PAGE, command_line()),
    )
    for page, text in pages:
        page.write_text(updated(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    SCHEMA_FILE.write_text(schema(), encoding="utf-8")


def command_line() -> str:
    """Return the options of several commands, then the commands with their arguments and other options, from click."""
    commands = list(_commands(dlock, ("dlock",)))
    written = Counter(_option(option) for _, command in commands for option in _options(command))
    shared = {line for line, times in written.items() if times >= SHARED}
    which = "Lists have the options about their output, actions the others; `--help` of a command shows its own."
    text = ["### Options of several commands", which, "\n".join(sorted(shared))]
    return "\n\n".join([*text, *(_command(words, command, shared) for words, command in commands)])


def _commands(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            default = command.commands["list"]
            yield (*words, name), default
            yield from (one for one in _commands(command, (*words, name)) if one[1] is not default)
        else:
            yield (*words, name), command


def _command(words: tuple[str, ...], command: click.Command, shared: set[str]) -> str:
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    usage = " ".join(
        [*words, *(str(one.name).upper() if one.required else f"[{one.name}]".upper() for one in arguments)]
    )
    text = [f"### `{usage}`", " ".join((command.help or "").split())]
    lines = [_option(one) for one in _options(command) if _option(one) not in shared]
    return "\n\n".join([*text, "\n".join(lines)]) if lines else "\n\n".join(text)


def _options(command: click.Command) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option)]


def _option(option: click.Option) -> str:
    names = " / ".join([*option.opts, *option.secondary_opts])
    default = f" Default: `{option.default}`." if option.show_default else ""
    return f"- `{names}`: {option.help}{default}"


def updated(page: str, text: str) -> str:
    """Return the page with `text` between the marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{_without_html(text.strip())}\n\n{END}{rest.partition(END)[2]}"


def _without_html(text: str) -> str:
    """Return Markdown that shows `<id>` as text. Markdown shows an unescaped one as an HTML tag: not at all."""
    parts = re.split(r"(`[^`]*`)", text)  # every second part is code
    parts[::2] = [re.sub(r"<(?=[A-Za-z/!?])", r"\\<", prose) for prose in parts[::2]]
    return "".join(parts)


def options() -> str:
    """Return the list of all options by chapter, then the chapters with the details."""
    fields = option_fields()
    listed, chapters = [], []
    for chapter in Chapter:
        title, label, link = chapter.value
        names = [name for name, declaration in OPTIONS.items() if declaration.chapter is chapter]
        listed.append(f"- {title}: {', '.join(f'[`{name}`](#{name})' for name in names)}.")
        entries = [entry(name, *fields[name]) for name in names]
        chapters.append("\n\n".join([f"## {title}", f"More: [{label}](../{link}).", *entries]))
    return "\n\n".join(["## All options", "\n".join(listed), *chapters])


def entry(name: str, annotation: str, text: str) -> str:
    """Return the section of an option. Its values are left out if its description has an item for each."""
    detail = markdown(text)
    values = "" if "\n- " in detail else f"Values: {allowed(name, annotation, text)}. "
    more = f" More: [{MORE[name][0]}]({MORE[name][1]})." if name in MORE else ""
    return f"### `{name}`\n\n{detail}\n\n{values}Default: {default_of(name)}.{more}"


def allowed(name: str, annotation: str, text: str) -> str:
    """Return the values of an option: its types, and for a text those of its description that its check accepts."""
    quoted = dict.fromkeys(re.findall(r'``"([a-z_+]+)"``', text))
    texts = ", ".join(f'`"{one}"`' for one in quoted if accepts(name, one))
    types = [TYPES.get(part, texts) for part in annotation.split(" | ")]
    return ", ".join(types)


def accepts(name: str, text: str) -> bool:
    """Return whether the check of an option accepts a text."""
    try:
        OPTIONS[name].check(name, text)
    except InvalidLockOptions:
        return False
    return True


def option_fields() -> dict[str, tuple[str, str]]:
    """Return the annotation of each field of `LockOptions`, and the docstring behind it."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LockOptions")
    found = {}
    for field, after in itertools.pairwise(body):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            described = re.sub(r"^    ", "", text, flags=re.MULTILINE).strip()
            found[field.target.id] = ast.unparse(field.annotation), described
    return found


def default_of(name: str) -> str:
    """Return the default of an option as Markdown."""
    default = OPTIONS[name].default
    return "not set" if default is UNSET else value(default)


def value(default: object) -> str:
    """Return the default of an option or a setting as Markdown."""
    if isinstance(default, float):
        return f"{default:g} s"
    return '`"' + default + '"`' if isinstance(default, str) else f"`{default!r}`"


def settings() -> str:
    """Return the table of the settings."""
    rows = ["| setting | default | values | meaning |", "| --- | --- | --- | --- |"]
    for name, setting in SETTINGS.items():
        see = f" ([more]({SEE[name]}))" if name in SEE else ""
        meaning = " ".join(markdown(setting.meaning).split())  # a row is one line
        shown = markdown(setting.default_text) or value(setting.default)
        rows.append(f"| `{name}` | {shown} | {markdown(setting.values.text)} | {meaning}{see} |")
    return "\n".join(rows)


def metrics() -> str:
    """Return the table of the metrics."""
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        values = f" ({', '.join(f'`{value}`' for value in metric.values)})" if metric.values else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels) + values or "none"
        rows.append(f"| `{metric.exported}` | {metric.kind} | {labels} | {metric.meaning} |")
    return "\n".join(rows)


def scripts() -> str:
    """Return the table of the scripts with the first sentence of each header."""
    rows = ["| script | what it does |", "| --- | --- |"]
    for path in sorted(SCRIPTS.glob("*.lua")):
        name = path.stem
        text = path.read_text(encoding="utf-8")
        if "\n-- @keys " not in text:  # a part that several scripts share
            continue
        lines = itertools.takewhile(lambda line: line.startswith("-- "), text.splitlines())
        paragraph = " ".join(line.removeprefix("-- ") for line in lines)
        does = paragraph.partition(f"{name}: ")[2].partition(". ")[0].removesuffix(".")
        if not does:
            raise SystemExit(f"{name}.lua: expected a first line '-- {name}: ...'")
        rows.append(f"| `{name}` | {does[0].upper()}{does[1:]}. |")
    return "\n".join(rows)


def markdown(text: str) -> str:
    """Return reStructuredText of a docstring as Markdown, one sentence per line outside of lists."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text.replace("``", "`"))
    blocks = []
    for block in text.split("\n\n"):
        items = re.split(r"\n(?=- )", block)
        joined = [re.sub(r"\s*\n\s*", " ", item) for item in items]
        blocks.append("\n".join(joined) if len(items) > 1 else re.sub(r"(?<=[a-z`)\d][.]) (?=[A-Z`])", "\n", joined[0]))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
