import re
from pathlib import Path

import pytest

from tests.support.processes import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_pin_has_a_hash_and_no_place_is_named(path: Path) -> None:
    text = path.read_text()
    lines = text.replace("\\\n", " ").splitlines()
    pins = [line for line in lines if line and not line.lstrip().startswith("#")]
    assert pins
    assert [pin for pin in pins if not re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:", pin)] == []
    assert not re.search(r"index|find-links|trusted-host|://", text)


def test_lane_oldest_installs_the_lower_bounds_of_pyproject() -> None:
    """A bound that moves without the lane fails here, so the lowest accepted versions are always tested."""
    metadata = (ROOT / "pyproject.toml").read_text()
    (declared,) = re.findall(r"^dependencies = \[(.*)\]$", metadata, re.MULTILINE)
    bounds = dict(re.findall(r'"(\w+)(?:\[redis\])?>=([\d.]+)', declared))
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements/oldest.txt").read_text(), re.MULTILINE))
    assert sorted(bounds) == ["billiard", "celery", "kombu", "redis"]
    assert {name: pins[name].removesuffix(".0") for name in bounds} == bounds
