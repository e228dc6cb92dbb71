"""The example project in a real browser, with a real server and a real worker: make test-servers."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from tests.django_admin.test_example_project import PROJECT, manage
from tests.support.browsers import running_browser
from tests.support.polling import eventually
from tests.support.processes import ROOT, free_port, kill_session, spawn, tail

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

USER = {
    "DJANGO_SUPERUSER_USERNAME": "operator",
    "DJANGO_SUPERUSER_PASSWORD": "pw",
    "DJANGO_SUPERUSER_EMAIL": "operator@shop.example",
}
SERVERS = {
    "wsgi": ("django", "runserver", "--noreload", "{port}"),
    "asgi": ("uvicorn", "project.asgi:application", "--lifespan", "off", "--port", "{port}"),
}
WORKER = ("celery", "-A", "project", "worker", "-n", "w1@%h", "-c", "2")


class Site:
    """The project with a database of its own, and the browser that visits it."""

    def __init__(self, folder: Path, redis_url: str, browser: Any, stack: ExitStack) -> None:
        self._log = folder / "processes.log"
        self._stack = stack
        self.browser = browser
        self.environ = {
            "REDIS_URL": redis_url,
            "DATABASE": str(folder / "db.sqlite3"),
            "WORK_SECONDS": "60",
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH"), str(ROOT)])),
        }
        manage(redis_url, "migrate", "-v", "0", DATABASE=self.environ["DATABASE"])
        manage(redis_url, "createsuperuser", "--noinput", DATABASE=self.environ["DATABASE"], **USER)

    def spawn(self, *command: str) -> Any:
        """Start `python -m` of this."""
        process = spawn([sys.executable, "-m", *command], self._log, environ=self.environ)
        self._stack.callback(kill_session, process)
        return process

    def serve(self, server: str) -> None:
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self.spawn(*(part.format(port=port) for part in SERVERS[server]))
        eventually(self._answers, within=60, message=tail(self._log))

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/admin/login/", timeout=5):
                return True
        except (HTTPError, URLError, ConnectionError, TimeoutError):
            return False

    def open(self, path: str) -> str:
        """Load a page, and return its visible text."""
        self.browser.get(self.url + path)
        return self.text()

    def text(self) -> str:
        return str(self.browser.find_element("tag name", "body").text)

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def press(self, selector: str) -> str:
        """Click on a part that leads to another page, wait for that page, and return its text."""
        before = self.find("html")
        self.find(selector).click()
        eventually(lambda: self.find("html") != before, within=20, message=selector)
        eventually(lambda: self.browser.execute_script("return document.readyState") == "complete", within=20)
        return self.text()

    def login(self) -> None:
        self.open("/admin/")
        self.find("#id_username").send_keys("operator")
        self.find("#id_password").send_keys("pw")
        assert "Locks" in self.press("[type=submit]")

    def add_order(self) -> None:
        self.open("/admin/orders/order/add/")
        self.find("#id_customer").send_keys("ann")
        self.find("#id_amount").send_keys("1250")
        assert "was added successfully" in self.press("[name=_save]")

    def act_on_all(self, path: str, action: str) -> str:
        """Select every entry of a list, by the check box above it, and run an action."""
        self.open(path)
        self.find("#action-toggle").click()
        self.find(f"select[name=action] option[value={action}]").click()
        return self.press("button[name=index]")


@pytest.fixture
def site(tmp_path: Path, redis_url: str) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, redis_url, stack.enter_context(running_browser()).driver, stack)


ORDER, ORDERS = "/admin/orders/order/1/change/", "/admin/orders/order/"


def test_operator_settles_the_outcome_of_a_killed_worker_under_djangos_login(site: Site) -> None:
    site.serve("wsgi")
    worker = site.spawn(*WORKER)
    site.login()
    site.add_order()
    site.act_on_all(ORDERS, "publish_invoices")
    eventually(lambda: "orders.tasks.send_invoice[" in site.open(ORDER), within=60, every=0.5)
    kill_session(worker)
    site.spawn(*WORKER)
    eventually(lambda: "orders.tasks.send_invoice" in site.open("/locks/unknown"), within=60, every=0.5)
    site.find("form[action$='/do/resolve'] button").click()
    site.browser.switch_to.alert.accept()
    eventually(lambda: "The outcome is settled." in site.text(), within=20)
    assert "No run has an unknown outcome." in site.open("/locks/unknown")
    assert "used" in site.open(ORDER)


@pytest.mark.parametrize("protocol", SERVERS)
def test_lock_is_held_by_an_operator_in_the_dashboard(site: Site, protocol: str) -> None:
    site.serve(protocol)
    assert "Username" in site.open("/locks/")
    site.login()
    site.add_order()
    site.open(ORDER)
    assert "Hold" in site.press(".celery-dlock p a")
    site.find("form[action$='/do/hold'] [name=for_]").clear()
    site.find("form[action$='/do/hold'] [name=for_]").send_keys("10m")
    site.find("form[action$='/do/hold'] [name=reason]").send_keys("gateway is down")
    assert "The lock is held" in site.press("form[action$='/do/hold'] button")
    assert "operator@" in site.open(ORDER)
    assert "gateway is down" in site.text()
