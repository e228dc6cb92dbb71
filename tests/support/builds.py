"""Other builds of the library, for workers that share locks with this one."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT


def build_of(commit: str, folder: Path) -> Path:
    """Return a folder with the library as it was at a commit, and nothing else of that commit."""
    if not (ROOT / ".git").exists() or (ROOT / ".git" / "shallow").exists():
        pytest.skip("this is not a clone with the whole history, so there is no other build")
    command = ["git", "archive", "--format=tar", "--output", str(folder / "build.tar"), commit, "celery_dlock"]
    subprocess.run(command, cwd=ROOT, check=True)
    with tarfile.open(folder / "build.tar") as tar:
        tar.extractall(folder, filter="data")
    return folder


def build_with(module: str, text: str, other: str, folder: Path) -> Path:
    """Return a folder with this library, in one module of which another text stands in place of a text."""
    shutil.copytree(ROOT / "celery_dlock", folder / "celery_dlock", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "celery_dlock" / module
    source = path.read_text()
    assert source.count(text) == 1
    path.write_text(source.replace(text, other))
    return folder


def environ_of(build: Path) -> dict[str, str]:
    """Return the environment of a process that imports the library from this folder."""
    # Without PYTHONSAFEPATH, `python -m` imports from the current directory first, which is this build.
    return {"PYTHONPATH": os.pathsep.join([str(build), str(ROOT)]), "PYTHONSAFEPATH": "1"}
