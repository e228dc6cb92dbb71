"""Helpers of the dashboard's tests: its app with an operator's rights, and forms as a browser sends them."""

import html
import re
from collections.abc import Mapping
from typing import Any

from celery import Celery
from starlette.testclient import TestClient

from celery_dlock.web import dashboard
from tests.support.servers import LOCK_USER, OPERATOR_USER

#: A name of this machine, which every dashboard knows.
SITE = "http://localhost"


def operators_url(lock_url: str) -> str:
    return lock_url.replace(f"{LOCK_USER}:", f"{OPERATOR_USER}:")


def client_of(app: Celery, rights: Any = "act", **facts: Any) -> TestClient:
    """Return a client of a dashboard that gives these rights to every request."""
    return TestClient(dashboard(app, access=lambda _: rights, **facts), base_url=SITE, follow_redirects=False)


def forms_on(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return the path and the hidden fields of each form of a page that changes something."""
    found = []
    for path, body in re.findall(r'<form method="post" action="([^"]*)"(.*?)</form>', text, re.DOTALL):
        fields = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', body)
        found.append((html.unescape(path), {key: html.unescape(value) for key, value in fields}))
    return found


def form_on(client: TestClient, page: str, verb: str, **chosen: str) -> tuple[str, dict[str, str]]:
    """Return the first form of a page that does this, and has these hidden fields."""
    for path, fields in forms_on(client.get(page).text):
        if path.endswith(f"/do/{verb}") and chosen.items() <= fields.items():
            return path, fields
    raise AssertionError(f"no form {verb} on {page}")


def send(client: TestClient, form: tuple[str, Mapping[str, str]], origin: str | None = SITE, **more: str) -> Any:
    path, fields = form
    return client.post(path, data={**fields, **more}, headers={"origin": origin} if origin else {})
