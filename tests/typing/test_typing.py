"""A type checker sees a decorated task with its function's own signature."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

CALLS = ROOT / "tests" / "typing" / "tasks.py"


def errors_in(path: Path) -> list[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout
    return [line for line in output.splitlines() if ": error: " in line and path.name in line]


@pytest.mark.timeout(300)  # with a cold cache on busy cores
def test_right_calls_pass_and_each_wrong_call_is_reported(tmp_path: Path) -> None:
    """Without its ignores, exactly the lines that carried one are errors, each of the kind that stood there."""
    source = CALLS.read_text()
    expected = {
        (number, kind)
        for number, line in enumerate(source.splitlines(), 1)
        for kind in re.findall(r"# type: ignore\[(.*)\]", line)
    }
    assert len(expected) > 15
    bare = tmp_path / "tasks_without_ignores.py"
    bare.write_text(re.sub(r"  # type: ignore\[.*\]", "", source))
    reported = {
        (int(match[1]), match[2])
        for line in errors_in(bare)
        if (match := re.search(r"\.py:(\d+): error: .*\[([a-z-]+)\]$", line))
    }
    assert reported == expected
