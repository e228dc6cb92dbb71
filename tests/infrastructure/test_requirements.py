import re
from pathlib import Path

import pytest

from tests.processes import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_pin_has_a_hash_and_no_place_is_named(path: Path) -> None:
    text = path.read_text()
    lines = text.replace("\\\n", " ").splitlines()
    pins = [line for line in lines if line and not line.lstrip().startswith("#")]
    assert pins
    assert [pin for pin in pins if not re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:", pin)] == []
    assert not re.search(r"index|find-links|trusted-host|://", text)
