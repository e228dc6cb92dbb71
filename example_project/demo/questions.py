"""Three commands of an operator, run against the demo's server while it is still up."""

import io
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout

from celery.bin.celery import celery

from example_project.demo.history import Fact

APP = "example_project.shop"
SHOWN = 14  # most lines to print of one answer


class _Terminal(io.StringIO):
    """Text that is kept. The commands print a table into it, with headings."""

    def isatty(self) -> bool:
        return True


def answers(facts: Sequence[Fact], states: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Return each command line and the lines it printed. They run in this process: new ones would take seconds."""
    return [(f"celery -A {APP} dlock {' '.join(words)}", _run(words)) for words in _questions(facts, states)]


def _questions(facts: Sequence[Fact], states: dict[str, str]) -> Iterator[list[str]]:
    yield ["list"]
    yield ["check"]
    # The web shop and the support desk request one receipt: the second call is skipped.
    published = {fact.task_id for fact in facts if fact.what == "publish" and fact.task == "shop.send_receipt"}
    skipped = [task_id for task_id in published if states.get(task_id) == "REVOKED"]
    if skipped:
        yield ["explain", min(skipped)]


def _run(words: Sequence[str]) -> list[str]:
    out = _Terminal()
    with redirect_stdout(out), redirect_stderr(out):
        code = celery.main(["-A", APP, "dlock", *words], prog_name="celery", standalone_mode=False)
    lines = out.getvalue().splitlines()
    if more := len(lines[SHOWN:]):
        lines[SHOWN:] = [f"... and {more} more lines"]
    return [*lines, f"exit code {code}"] if code else lines
