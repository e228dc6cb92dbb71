"""tools/release-notes, by which a tag becomes the text of a release."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT

CHANGELOG = """# Changelog

## [0.2.0] - 2026-12-01

### Added

- New.

## [0.1.0] - 2026-11-01

- Old.
"""


def release_notes(folder: Path, tag: str, changelog: str) -> subprocess.CompletedProcess[str]:
    (folder / "tools").mkdir()
    shutil.copy(ROOT / "tools/release-notes", folder / "tools")
    (folder / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    return subprocess.run([folder / "tools/release-notes", tag], capture_output=True, text=True, check=False)


def test_notes_of_a_release_are_its_section_alone(tmp_path: Path) -> None:
    made = release_notes(tmp_path, "v0.2.0", CHANGELOG)
    assert made.stdout == "### Added\n\n- New.\n"
    assert made.returncode == 0


@pytest.mark.parametrize(
    ("tag", "changelog", "said"),
    [
        ("v0.1.0", CHANGELOG, "tag v0.1.0: expected v0.2.0"),
        ("0.2.0", CHANGELOG, "tag 0.2.0: expected v0.2.0"),
        ("v0.2.0", CHANGELOG.replace("2026-12-01", "not released yet"), "no dated section"),
        ("v0.2.0", "## [0.2.0] - 2026-12-01\n\n## [0.1.0] - 2026-11-01\n\n- Old.\n", "no text for 0.2.0"),
    ],
    ids=["other-version", "no-v", "undated", "empty"],
)
def test_tag_without_its_section_is_refused(tmp_path: Path, tag: str, changelog: str, said: str) -> None:
    refused = release_notes(tmp_path, tag, changelog)
    assert said in refused.stderr
    assert (refused.returncode, refused.stdout) == (1, "")
