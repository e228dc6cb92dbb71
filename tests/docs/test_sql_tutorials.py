"""The tutorials with a database: a test does what they say, and the worker's processes kill themselves."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.polling import eventually
from tests.support.postgresql import running_postgresql
from tests.support.processes import ROOT, kill_session, spawn, tail
from tests.support.servers import Server

pytestmark = [pytest.mark.servers, pytest.mark.invariant("settled-run-is-used-with-its-rows")]

#: What the page on Django leaves to Django and Celery.
PROJECT = {
    "shop/settings.py": """
from urllib.parse import urlsplit
place = urlsplit("postgresql://localhost/shop")
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
SECRET_KEY = "for tests"
USE_TZ = True
DATABASES = {"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": place.path[1:], "USER": place.username, "HOST": place.hostname,
    "PORT": place.port,
}}
""",
    "shop/__init__.py": """
import os
from celery import Celery
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
""",
    "manage.py": """
import sys, shop
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
""",
}

WAIT_UNTIL_USED = """
import time
for number in (1, 2):
    while getattr(book.used(number), "state", "") != "used":
        time.sleep(0.1)
"""


class Reader:
    """A reader who does what a tutorial says, in a folder, with servers at other addresses."""

    def __init__(self, page: str, folder: Path, database: str, redis: str) -> None:
        self.text, self.folder = (ROOT / "docs" / "tutorials" / page).read_text(), folder
        self.database, self._redis = database, redis

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        text = text.replace("redis://localhost", self._redis)
        for scheme in ("postgresql", "postgresql+psycopg"):
            text = text.replace(f"{scheme}://localhost/shop", self.database.replace("postgresql", scheme, 1))
        with path.open("a") as file:
            file.write(text)

    def blocks(self, language: str) -> list[str]:
        return re.findall(rf"```{language}\n(.*?)```", self.text, re.DOTALL)

    def run(self, *command: str) -> None:
        subprocess.run(command, cwd=self.folder, env=self.environ, check=True, timeout=100)

    @property
    def environ(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder), str(ROOT)])
        return {**os.environ, "PYTHONPATH": path, "C_FORCE_ROOT": "1", "PATH": f"{Path(sys.executable).parent}:/bin"}

    def numbers(self, table: str) -> list[Any]:
        with psycopg.connect(self.database) as connection:
            return [number for (number,) in connection.execute(f"SELECT number FROM {table} ORDER BY number")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["book-an-invoice-sqlalchemy.md", "book-an-invoice-django.md"])
def test_each_invoice_is_booked_once(page: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running_postgresql())
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute("CREATE DATABASE shop")
        broker = stack.enter_context(Server(tmp_path / "server"))
        reader = Reader(page, tmp_path, server.removesuffix("/postgres") + "/shop", broker.url(0))
        files = PROJECT if "django" in page else {}
        for name, text in files.items():
            reader.write(name, text)
        for block in reader.blocks("python"):
            named = re.match(r"# (\S+)\n", block)
            reader.write(named[1] if named else "billing.py", block)
        (terminal,) = reader.blocks("sh")
        *commands, worker = terminal.splitlines()
        for command in commands:
            words = command.replace("psql shop", f"psql {reader.database}")
            reader.run("sh", "-c", words)
        log = tmp_path / "worker.log"
        running = spawn(worker.split(), log, environ=reader.environ)
        stack.callback(kill_session, running)
        shell = [line[4:] for block in reader.blocks("pycon") for line in block.splitlines() if line[:4] == ">>> "]
        start = ["import django, shop", "django.setup()"] if files else []
        reader.run(sys.executable, "-c", "\n".join([*start, *shell[:2]]))
        table = "shop_booking" if files else "booking"

        def both_killed_and_booked() -> bool:
            return log.read_text().count("WorkerLostError(") >= 2 and set(reader.numbers(table)) == {1, 2}

        eventually(both_killed_and_booked, 60, message=tail(log))
        reader.run(sys.executable, "-c", "\n".join([*start, shell[0], WAIT_UNTIL_USED]))
        assert reader.numbers(table) == [1, 2]
