"""The tests of the example project, as its developers run them: by pytest, with the plugin and no server."""

import re
import subprocess
import sys

from tests.support.processes import ROOT


def test_example_projects_own_tests_pass_without_a_server() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "example_project/tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 12


def test_plugin_imports_nothing_until_a_fixture_is_used() -> None:
    code = "import sys, pytest; before = set(sys.modules); import pytest_celery_dlock; print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'pytest_celery_dlock'}"
