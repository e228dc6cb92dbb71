"""``celery dlock web``: which address it serves to which users."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from celery import Celery
from passlib.apache import HtpasswdFile
from passlib.context import CryptContext
from starlette.testclient import TestClient

from celery_dlock.errors import InvalidLockOptions
from celery_dlock.store.redis.store import RedisStore
from celery_dlock.web import dashboard
from celery_dlock.web.basic_auth import PasswordFile
from celery_dlock.web.server import is_local, protected
from tests.contract.helpers import NAME, request_of, take
from tests.contract.test_cli import MODULE, Run, module, run  # noqa: F401  # fixtures are found by being here
from tests.contract.web_helpers import SITE, form_on, operators_url, send
from tests.support.polling import eventually
from tests.support.processes import ROOT, free_port

LOCAL, EVIL = "http://localhost:5556", "http://evil.example"
pytestmark = pytest.mark.invariant("dashboard-access-is-asked")


@pytest.fixture
def app(make_app: Callable[..., Celery], lock_url: str) -> Celery:
    return make_app(operators_url(lock_url))


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A file with the user ada, whose password is "s3cret"."""
    path = tmp_path / "users"
    made = HtpasswdFile(path, new=True, context=CryptContext(["bcrypt"], bcrypt__rounds=4))
    made.set_password("ada", "s3cret")
    made.save()
    return path


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", "127.0.0.1.example.com"])
def test_address_for_other_machines_is_refused_without_users(run: Run, host: str) -> None:  # noqa: F811
    result = run("web", "--host", host)
    assert (result.exit_code, "--auth-file FILE" in result.output) == (2, True), result.output


def test_redlock_is_refused_before_anything_is_served(
    make_app: Callable[..., Celery],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,  # noqa: F811
) -> None:
    """Its servers may differ, so no page could say what is locked."""
    urls = [f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]
    with pytest.raises(InvalidLockOptions, match="cannot show the locks of a Redlock as a whole"):
        dashboard(make_app(urls))
    (tmp_path / "redlock_shop.py").write_text(MODULE.format(url=urls))
    monkeypatch.syspath_prepend(tmp_path)
    result = run("web", app="redlock_shop")
    assert (result.exit_code, "give one of them" in result.output) == (78, True), result.output


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False)]
)
def test_loopback_addresses_are_local(host: str, local: bool) -> None:
    assert is_local(host) is local


@pytest.mark.parametrize("access", ["nothing", "nothing:f", "os:nothing", "os:name", "os.path.join"])
def test_access_that_is_no_function_is_refused(run: Run, access: str) -> None:  # noqa: F811
    result = run("web", "--access", access)
    assert (result.exit_code, "--access" in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    "line", ["", "ada:s3cret", "ada:$apr1$bUl1Kt4A$Ob6YTp4PJWc0wKEPCBT5B0", "ada:{SHA}DQPXnzMpAtWVVAhMCcrLqaYkiLM="]
)
def test_file_without_slow_hashes_is_refused(run: Run, tmp_path: Path, line: str) -> None:  # noqa: F811
    (tmp_path / "users").write_text(line)
    result = run("web", "--auth-file", str(tmp_path / "users"))
    assert (result.exit_code, "htpasswd -B" in result.output) == (2, True), result.output
    assert "s3cret" not in result.output


def test_users_of_the_file_act_and_others_see_nothing(app: Celery, store: RedisStore, users: Path) -> None:
    take(store, "x.1", request_of("x"))
    client = TestClient(protected(app, "0.0.0.0", users, None), base_url=SITE, follow_redirects=False)
    for auth in (None, ("ada", "wrong"), ("eve", "s3cret"), ("ada", ""), ("ada", "a\0b"), ("ada", "x" * 100), ("", "")):
        answer = client.get("/locks", auth=auth)
        assert (answer.status_code, "x.1" in answer.text) == (401, False)
        assert answer.headers["www-authenticate"].startswith("Basic ")
    assert client.get("/locks", headers={"authorization": "Basic %%%"}).status_code == 401
    assert client.get("/healthz").status_code == 200
    client.auth = ("ada", "s3cret")
    assert "User: ada<" in client.get("/locks").text.replace("\n", "<")
    assert (
        send(
            client, form_on(client, "/lock?name=x:8efdfc7d54280927d79cc592bc15c180", "release"), force="yes"
        ).status_code
        == 303
    )


def test_user_who_is_deleted_from_the_file_is_refused(app: Celery, users: Path) -> None:
    client = TestClient(protected(app, "0.0.0.0", users, None))
    client.auth = ("ada", "s3cret")
    assert client.get("/locks").status_code == 200
    users.write_text(users.read_text().replace("ada:", "bob:"))
    os.utime(users, (1, 1))
    assert client.get("/locks").status_code == 401


def test_unknown_user_costs_a_check_as_a_wrong_password_does(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time of the answer says which names are in the file."""
    passwords = PasswordFile(users)
    checked = []
    verify = CryptContext.verify
    monkeypatch.setattr(CryptContext, "verify", lambda *given: checked.append(given[2]) or verify(*given))
    assert not passwords.check("ada", "wrong")
    assert not passwords.check("eve", "s3cret")
    assert len(checked) == 2
    assert checked[0] == checked[1]


def test_password_that_is_changed_during_its_check_is_not_remembered(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passwords = PasswordFile(users)
    verify = CryptContext.verify

    def slow(*given: Any) -> bool:
        correct = verify(*given)
        users.write_text(users.read_text().replace("ada:", "bob:"))
        os.utime(users, (1, 1))
        assert not passwords.remembers("bob", "s3cret")  # another request reads the file again
        return correct

    with monkeypatch.context() as patched:
        patched.setattr(CryptContext, "verify", slow)
        assert passwords.check("ada", "s3cret")  # it was correct when it was asked
    assert not passwords.remembers("ada", "s3cret")
    assert not passwords.check("ada", "s3cret")


def test_user_whose_password_is_remembered_does_not_wait_for_guesses(
    app: Celery, users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, at_once = threading.Event(), []
    verify = CryptContext.verify

    def slow(*given: Any) -> bool:
        if given[1] == "guess":
            at_once.append(1)
            go_on.wait(30)
        return verify(*given)

    monkeypatch.setattr(CryptContext, "verify", slow)
    transport = httpx2.ASGITransport(app=protected(app, "0.0.0.0", users, None))

    async def ask(password: str) -> int:
        async with httpx2.AsyncClient(transport=transport, base_url=LOCAL, auth=("ada", password)) as client:
            return int((await client.get("/locks")).status_code)

    async def attack() -> list[int]:
        assert await ask("s3cret") == 200
        guesses = [asyncio.create_task(ask("guess")) for _ in range(60)]
        try:
            await asyncio.to_thread(eventually, lambda: len(at_once) == 2)
            assert await asyncio.wait_for(ask("s3cret"), 20) == 200
            assert len(at_once) == 2
        finally:
            go_on.set()
        return await asyncio.gather(*guesses)

    assert sorted(asyncio.run(attack())) == [401] * 8 + [429] * 52


HOSTS = [
    ("localhost:5556", 200),
    ("LOCALHOST", 200),
    ("127.0.0.1", 200),
    ("[::1]:5556", 200),
    ("ops.example.com", 200),
    ("ops.example.com.:443", 200),
    ("a.b.example.org", 200),
    ("example.org", 200),
    ("evil.example:5556", 400),
    ("ops.example.com.evil.example", 400),
    ("x.ops.example.com", 400),
    ("badexample.org", 400),
    ("ops.example.com@evil.example", 400),
    ("evil.example#ops.example.com", 400),
    ("[::1", 400),
    ("", 400),
]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_only_names_that_were_given_are_answered(app: Celery, host: str, status: int) -> None:
    """Otherwise a web page reads the dashboard and acts, under a name of its own (DNS rebinding)."""
    made = dashboard(app, access=lambda _: "act", hosts=["ops.example.com", ".Example.org"])
    answer = TestClient(made, follow_redirects=False).get("/locks", headers={"host": host})
    assert answer.status_code == status
    assert "content-security-policy" in answer.headers
    assert TestClient(made).get("/healthz", headers={"host": host}).status_code == 200


def test_form_under_an_unknown_name_changes_nothing(app: Celery, store: RedisStore) -> None:
    take(store, "x.1", request_of("x"))
    page = "/lock?name=x:8efdfc7d54280927d79cc592bc15c180"
    form = form_on(TestClient(dashboard(app, access=lambda _: "act", hosts=["*"]), base_url=EVIL), page, "release")
    client = TestClient(dashboard(app, access=lambda _: "act"), base_url=EVIL, cookies={"dlock_csrf": form[1]["csrf"]})
    assert send(client, form, EVIL, force="yes").status_code == 400
    assert store.inspect(NAME)


@pytest.mark.parametrize("name", ["https://ops.example.com", "ops.example.com:443", "ops.example.com/dlock", ""])
def test_host_that_is_no_name_is_refused(app: Celery, run: Run, name: str) -> None:  # noqa: F811
    with pytest.raises(InvalidLockOptions, match="invalid host"):
        dashboard(app, hosts=[name])
    result = run("web", "--access", "celery_dlock.web:read_only", "--allowed-host", name)
    assert (result.exit_code, "invalid host" in result.output) == (2, True), result.output


@pytest.mark.parametrize("access", [None, "celery_dlock.web:read_only"])
def test_own_server_without_users_answers_only_names_that_were_given(app: Celery, access: str | None) -> None:
    made = protected(app, "127.0.0.1", None, access, ["ops.example.com"])
    for host, status in (("localhost:5556", 200), ("ops.example.com", 200), ("evil.example:5556", 400)):
        assert TestClient(made).get("/locks", headers={"host": host}).status_code == status
    assert "(read-only)" in TestClient(made, base_url=LOCAL).get("/locks").text


def test_access_decides_also_for_users_of_the_file(app: Celery, users: Path) -> None:
    client = TestClient(protected(app, "0.0.0.0", users, "celery_dlock.web:read_only"))
    assert client.get("/locks").status_code == 401
    assert "(read-only)" in client.get("/locks", auth=("ada", "s3cret")).text
    with pytest.raises(InvalidLockOptions, match="MODULE:FUNCTION"):
        protected(app, "0.0.0.0", users, "celery_dlock.web")


def test_command_serves_under_the_path_of_a_proxy_until_it_is_interrupted(
    module: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "celery", "-A", module, "dlock", "web", "--port", str(port), "--root-path", "/ops"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True) as server:
        try:
            eventually(lambda: answers(port), 60)
            page = httpx2.get(f"http://127.0.0.1:{port}/locks")
            assert 'href="/ops/static/dashboard.css"' in page.text
            assert httpx2.get(f"http://127.0.0.1:{port}/static/dashboard.css").status_code == 200
        finally:
            server.send_signal(signal.SIGINT)
            _, said = server.communicate(timeout=40)
    assert f"http://127.0.0.1:{port}/ops/" in said
    assert "Traceback" not in said


def answers(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    except httpx2.ConnectError:
        return False
