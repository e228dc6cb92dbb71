"""docker-compose.yml without Docker: our services' own commands, run against servers started here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from celery import Celery
from celery.result import AsyncResult

from example_project.demo.sinks import Mailbox, smtp_server
from tests.support.polling import eventually
from tests.support.processes import HOST, ROOT, free_port, kill_session, spawn, tail
from tests.support.servers import Server

COMPOSE = ROOT / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service and "profiles" not in service}
WORKERS = ["worker-a", "worker-b"]
BEATS = ["beat-a", "beat-b"]


@dataclass(frozen=True)
class Shop:
    """All of our services, running."""

    folder: Path
    ports: Mapping[str, int]
    mailbox: Mailbox
    results: Celery

    def log(self, service: str) -> str:
        return tail(self.folder / f"{service}.log", 1000)

    def environ(self, service: str) -> dict[str, str]:
        environ = {name: self.here(value) for name, value in OURS[service]["environment"].items()}
        # The commands name their programs as the image has them: on the path.
        environ["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        return environ | {"SHOP_REPORT_EVERY": "1"}  # a test need not wait as long as a visitor

    def here(self, text: str) -> str:
        """`text` with the places of the services' own network replaced by those of this run, and the defaults used."""
        text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)
        for service, port in self.ports.items():
            text = re.sub(rf"\b{service}:\d+", f"{HOST}:{port}", text)
        listening = re.sub(r"\b0\.0\.0\.0:8080\b", f"{HOST}:{self.ports['sms-gateway']}", text)
        return listening.replace("/tmp/", f"{self.folder}/")

    def call(self, task: str, *args: str) -> AsyncResult[Any]:
        """Publish a task as the head of docker-compose.yml says."""
        command = ["celery", "-A", "example_project.shop", "call", task, f"--args={json.dumps(args)}"]
        environ = self.environ("worker-a")
        called = subprocess.run(
            command, env=environ, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=60
        )
        return self.results.AsyncResult(called.stdout.strip())


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder / "valkey"))
        address, mailbox = stack.enter_context(smtp_server())
        assert server.port is not None
        ports = {"valkey": server.port, "mail": int(address.rpartition(":")[2]), "sms-gateway": free_port()}
        results = stack.enter_context(Celery(backend=server.url()))
        shop = Shop(folder, ports, mailbox, results)
        for name, service in OURS.items():
            command = [shop.here(word) for word in service["command"]]
            process = spawn(command, folder / f"{name}.log", environ=shop.environ(name))
            stack.callback(kill_session, process)
        eventually(lambda: all(" ready." in shop.log(name) for name in WORKERS), within=60)
        yield shop


def test_the_file_has_two_of_everything_that_may_die() -> None:
    always = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert always == {"valkey", "mail", "sms-gateway", *WORKERS, *BEATS}
    assert set(OURS) == {"sms-gateway", *WORKERS, *BEATS}


@pytest.mark.parametrize("service", OURS)
def test_every_host_a_service_is_given_is_a_service(service: str) -> None:
    environment = OURS[service]["environment"]
    told = {host for value in environment.values() for host in re.findall(r"([a-z][a-z-]*):\d+", value)}
    assert told == {"valkey", "mail", "sms-gateway"}
    assert set(OURS[service]["depends_on"]) <= set(SERVICES)


@pytest.mark.parametrize("store", ["postgresql", "mysql"])
def test_a_profile_adds_a_database_and_makes_its_tables(store: str) -> None:
    added = {name for name, service in SERVICES.items() if store in service.get("profiles", ())}
    assert added == {store, "migrate"}
    assert OURS["worker-a"]["environment"]["DLOCK_URL"].startswith("${DLOCK_URL:-")
    assert f"DLOCK_URL={store}://shop:shop@{store}/shop docker compose --profile {store} up" in COMPOSE.read_text()


def test_the_image_is_built_from_files_that_exist() -> None:
    dockerfile = ROOT / OURS["worker-a"]["build"]["dockerfile"]
    lines = re.findall(r"^COPY (.+)$", dockerfile.read_text(), re.MULTILINE)
    copied = [source for line in lines for source in line.split()[:-1]]
    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []


@pytest.mark.parametrize("beat", BEATS)
def test_both_beats_publish(shop: Shop, beat: str) -> None:
    eventually(lambda: shop.log(beat).count("Sending due task nightly-report") >= 2, within=60)


def test_the_report_that_the_beats_ask_for_is_made(shop: Shop) -> None:
    done = re.compile(r"Task shop\.nightly_report\[.+\] succeeded")
    eventually(lambda: any(done.search(shop.log(worker)) for worker in WORKERS), within=60)


def test_a_receipt_called_twice_is_one_mail(shop: Shop) -> None:
    calls = [shop.call("shop.send_receipt", "R-1", "ann@shop.example") for _ in range(2)]
    eventually(lambda: all(call.ready() for call in calls), within=60)
    assert sorted(call.state for call in calls) == ["REVOKED", "SUCCESS"]
    assert shop.mailbox.received() == {"R-1": 1}


def test_an_sms_reaches_the_gateway(shop: Shop) -> None:
    call = shop.call("shop.send_sms", "S-1", "+0001", "Your parcel is on its way")
    eventually(call.ready, within=60)
    with urllib.request.urlopen(f"http://{HOST}:{shop.ports['sms-gateway']}", timeout=10) as counts:
        assert json.load(counts) == {"S-1": 1}
