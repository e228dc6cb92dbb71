"""``manage.py check`` of a Django project reports what would stop or harm its Celery worker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import OwnServer
from tests.support.processes import ROOT

SETTINGS = """
SECRET_KEY = "for tests"
USE_TZ = True
INSTALLED_APPS = ["celery_dlock.django", "shop"]
CELERY_BROKER_URL = "redis://localhost:1/0"
"""
CELERY = """
import os
from celery import Celery
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
app = Celery("project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""
TASKS = """
from celery import shared_task
from celery_dlock import LockOptions, singleton_task

@singleton_task(key=["order_id"])
def send_invoice(order_id): ...
"""


def checked(
    folder: Path, settings: str = "", tasks: str = "", command: str = "check"
) -> subprocess.CompletedProcess[str]:
    """Run a management command of a project with these lines added to its settings and to the tasks of its app."""
    files = {
        "project/__init__.py": "from .celery import app\n",
        "project/celery.py": CELERY,
        "project/settings.py": SETTINGS + settings,
        "shop/__init__.py": "",
        "shop/tasks.py": TASKS + tasks,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "DJANGO_SETTINGS_MODULE": "project.settings"}
    return subprocess.run(
        [sys.executable, "-m", "django", *command.split()],
        check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_correct_project_has_no_issues_and_runs_the_other_checks_once(tmp_path: Path) -> None:
    counted = """
from django.core.checks import Info, register

@register
def counting(app_configs, **options):
    print("the other check")
    return []
"""
    found = checked(tmp_path, tasks=counted)
    assert found.returncode == 0, found.stderr
    assert "System check identified no issues" in found.stdout
    assert found.stdout.count("the other check") <= 1


@pytest.mark.parametrize(
    ("settings", "tasks", "text"),
    [
        ("CELERY_DLOCK_TLL = 5", "", "(celery_dlock.E001) unknown setting 'dlock_tll'"),
        ("CELERY_DLOCK_TTL = 0", "", "(celery_dlock.E001) invalid dlock_ttl=0"),
        ("CELERY_DLOCK_ENABLED = 'no'", "", "(celery_dlock.E001) invalid dlock_enabled='no'"),
        ("CELERY_BROKER_URL = 'amqp://localhost'", "", "(celery_dlock.E002) dlock_url is not set"),
        (
            "",
            "@singleton_task(key=['nobody'])\ndef other(order_id): ...",
            "(celery_dlock.E003) task 'shop.tasks.other'",
        ),
        (
            "CELERY_DLOCK_URL = ['redis://localhost:1', 'redis://localhost:2', 'redis://localhost:3']",
            "@singleton_task(on_conflict='queue')\ndef other(): ...",
            "(celery_dlock.E003) task 'shop.tasks.other': invalid on_conflict='queue'",
        ),
        (
            "",
            "@shared_task(lock_options=LockOptions())\ndef other(): ...",
            "(celery_dlock.W001) Task shop.tasks.other has lock_options but runs without a lock",
        ),
    ],
)
def test_each_mistake_is_one_message(tmp_path: Path, settings: str, tasks: str, text: str) -> None:
    found = checked(tmp_path, settings, tasks, "check --fail-level WARNING")
    assert found.returncode == 1, found.stdout
    assert text in found.stderr
    assert found.stderr.count("(celery_dlock.") == 1
    assert "Traceback" not in found.stderr


def test_tests_without_locks_need_no_store(tmp_path: Path) -> None:
    found = checked(tmp_path, "CELERY_BROKER_URL = 'amqp://localhost'\nCELERY_DLOCK_ENABLED = False")
    assert found.returncode == 0, found.stderr


def test_the_app_has_no_migrations(tmp_path: Path) -> None:
    database = 'DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}'
    found = checked(tmp_path, database, command="makemigrations --check --dry-run")
    assert (found.returncode, found.stdout) == (0, "No changes detected\n")


def deployed(folder: Path, url: str) -> list[str]:
    """Return the ids of this package's messages of ``check --deploy``."""
    found = checked(folder, f"CELERY_DLOCK_URL = '{url}'", command="check --deploy --tag celery_dlock")
    assert "Traceback" not in found.stderr
    return re.findall(r"\(celery_dlock\.(\w+)\)", found.stderr)


def test_deploy_check_warns_of_a_store_that_can_lose_locks(tmp_path: Path, own_server: OwnServer) -> None:
    lossy = own_server(options=["--maxmemory-policy", "allkeys-lru"])
    assert deployed(tmp_path, lossy.url()) == ["W002", "W003"]


def test_deploy_check_accepts_a_store_that_keeps_its_data(tmp_path: Path, own_server: OwnServer) -> None:
    assert deployed(tmp_path, own_server(persistent=True).url()) == []


def test_deploy_check_says_that_an_absent_store_was_not_checked(tmp_path: Path) -> None:
    assert deployed(tmp_path, "redis://127.0.0.1:1/0") == ["W004"]


def test_check_without_deploy_does_not_connect_to_the_store(tmp_path: Path) -> None:
    found = checked(tmp_path, "CELERY_DLOCK_URL = 'redis://127.0.0.1:1/0'", command="check --fail-level WARNING")
    assert found.returncode == 0, found.stderr
