"""``dlock watch`` and ``dlock list`` in a real terminal, and ``dlock metrics`` over HTTP."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import urllib.request
import uuid

import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner

from celery_dlock import Lock
from celery_dlock.keys.key_spec import shared_name
from tests.contract.helpers import NAME, request_of
from tests.contract.test_cli import MODULE
from tests.support.polling import eventually
from tests.support.processes import ROOT

pytest.importorskip("rich", reason="installed in the main lane only")

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[=>78]")


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A function that writes a module of an app with this store, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(url, name="watched"):
        (tmp_path / f"{name}.py").write_text(MODULE.format(url=url))
        return name

    return write


class Terminal:
    """A command in a terminal of 40 lines."""

    def __init__(self, tmp_path, *words, columns=160):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TERM": "xterm-256color"}
        env = {name: value for name, value in env.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
        command = [sys.executable, "-m", "celery", *words]
        self.process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.raw = ""
        threading.Thread(target=self._read, args=(master,), daemon=True).start()

    def _read(self, master):
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:
                return
            if not piece:
                return
            self.raw += piece.decode(errors="replace")

    @property
    def text(self):
        return ESCAPES.sub("", self.raw)

    def wait_for(self, text, after=0):
        return eventually(lambda: text in self.text[after:], within=30, message=f"{text!r} in the terminal")

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture
def terminal(tmp_path):
    made = []

    def run(*words, **facts):
        made.append(Terminal(tmp_path, *words, **facts))
        return made[-1]

    yield run
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(10)


def app_at(url):
    app = Celery("watching", broker="memory://", set_as_current=False)
    app.conf.dlock_url = url
    return app


def test_list_fits_the_terminal_unless_all_is_asked_for(shop, terminal, store, redis_url):
    name = shared_name("an-import-of-orders-with-a-long-name:" + "x" * 40)
    store.acquire(name, "x.1", 300_000, request_of(str(uuid.uuid4())))
    module = shop(redis_url)
    for words, short in (((), True), (("--wide",), False)):
        seen = terminal("-A", module, "dlock", "list", *words, columns=100)
        assert seen.process.wait(30) == 0
        seen.wait_for("WAITERS")
        held = eventually(lambda: [line for line in seen.text.splitlines() if "held" in line])[0]  # noqa: B023
        assert (len(held) <= 100, name.text in held, "--wide shows" in seen.text) == (short, not short, short)
        assert "\x1b[32mheld" in seen.raw


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_shows_locks_and_ends_cleanly_at_a_signal(shop, terminal, redis_url, number):
    with Lock("watched-one", app=app_at(redis_url)):
        seen = terminal("-A", shop(redis_url), "dlock", "watch", "--every", "0.2")
        seen.wait_for("watched-one")
    before = len(seen.text)
    seen.wait_for("locks 0", before)
    assert seen.end(number) == 0
    assert "Traceback" not in seen.text
    # The cursor is shown again, and the alternate screen is left.
    assert seen.raw.rindex("\x1b[?25h") > seen.raw.rindex("\x1b[?25l")
    assert "\x1b[?1049l" in seen.raw


def test_watch_says_that_it_shows_some_of_the_locks_if_there_are_more_than_rows(shop, terminal, store, redis_url):
    for number in range(120):
        store.acquire(shared_name(f"many-{number}"), f"x.{number}", 300_000, request_of("many"))
    seen = terminal("-A", shop(redis_url), "dlock", "watch", "--every", "0.2")
    seen.wait_for("Some of the locks, their oldest first")
    seen.end(signal.SIGINT)


def test_watch_shows_that_the_store_is_away_and_goes_on(shop, terminal, own_server):
    server = own_server()
    with Lock("still-shown", app=app_at(server.url())):
        seen = terminal("-A", shop(server.url()), "dlock", "watch", "--every", "0.2")
        seen.wait_for("still-shown")
        server.pause()
        before = len(seen.text)
        seen.wait_for("the store does not answer, trying again", before)
        seen.wait_for("still-shown", before)
        server.resume()
        before = len(seen.text)
        seen.wait_for("unknown outcomes 0", before)
    assert seen.end(signal.SIGINT) == 0


def test_watch_shows_markup_and_escapes_of_a_task_id_as_text(shop, terminal, store, redis_url):
    store.acquire(NAME, "x.1", 300_000, request_of("[red]bell\x07[/red]"))
    seen = terminal("-A", shop(redis_url), "dlock", "watch", "--every", "0.2")
    seen.wait_for(r"[red]bell\x07[/red]")
    seen.end(signal.SIGINT)
    assert "\x07" not in seen.raw


def test_watch_without_a_terminal_or_without_rich_is_refused(shop, redis_url, monkeypatch):
    name = shop(redis_url)
    result = CliRunner().invoke(celery_command, ["-A", name, "dlock", "watch"])
    assert (result.exit_code, "needs a terminal" in result.output) == (2, True)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    result = CliRunner().invoke(celery_command, ["-A", name, "dlock", "watch"])
    assert (result.exit_code, "celery-dlock[watch]" in result.output) == (2, True)


def test_metrics_serves_the_gauges_of_the_store_until_ctrl_c(shop, terminal, redis_url):
    with Lock("gauged", app=app_at(redis_url)):
        seen = terminal("-A", shop(redis_url), "dlock", "metrics", "--port", "0")
        seen.wait_for("/metrics; Ctrl-C ends")
        (port,) = re.findall(r"http://127.0.0.1:(\d+)/metrics;", seen.text)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            text = page.read().decode()
    assert 'celery_dlock_locks{task="other"} 1.0' in text
    taken = terminal("-A", shop(redis_url), "dlock", "metrics", "--port", port)
    assert taken.process.wait(20) == 1
    taken.wait_for("metrics are not served at 127.0.0.1")
    assert seen.end(signal.SIGINT) == 0


def test_metrics_without_prometheus_client_says_what_to_install(shop, redis_url, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = CliRunner().invoke(celery_command, ["-A", shop(redis_url), "dlock", "metrics", "--port", "0"])
    assert (result.exit_code, "celery-dlock[prometheus]" in result.output) == (2, True)
