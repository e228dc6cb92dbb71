"""The Django project of example_project/: its own tests, and the commands of its page."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

PROJECT = ROOT / "example_project/django_shop"


def manage(redis_url: str, *command: str, **environ: str) -> str:
    """Run a command of the project, and return what it printed."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    ran = subprocess.run(
        [sys.executable, "manage.py", *command],
        check=False, cwd=PROJECT, capture_output=True, text=True, timeout=90,
        env={**os.environ, "REDIS_URL": redis_url, "PYTHONPATH": path, "PYTHONWARNINGS": "error", **environ},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_tests_of_the_example_project_pass(redis_url: str) -> None:
    printed = manage(redis_url, "test")
    assert "Ran 4 tests" in printed
    assert printed.rstrip().endswith("OK\nDestroying test database for alias 'default'...")


def test_example_project_has_all_migrations(redis_url: str, tmp_path: Path) -> None:
    database = str(tmp_path / "db.sqlite3")
    assert manage(redis_url, "makemigrations", "--check", "--dry-run", DATABASE=database) == "No changes detected\n"
