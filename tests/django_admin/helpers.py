"""Helpers of the tests of the admin: addresses, actions as a browser posts them, and Django's log entries."""

import re
from collections.abc import Callable
from html import unescape
from typing import Any

from django.apps import apps

Login = Callable[..., Any]


def page_of(model: str) -> str:
    return f"/admin/celery_dlock/{model}/"


def targets(response: Any) -> list[str]:
    """Return the values of the check boxes of a list."""
    return [
        unescape(text) for text in re.findall(r'name="_selected_action" value="([^"]*)"', response.content.decode())
    ]


def act(client: Any, page: str, action: str, selected: list[str], **values: str) -> str:
    """Confirm an action on these entries, and return the text of the page that follows."""
    asked = {"action": action, "_selected_action": selected}
    confirmation = client.post(page, asked)
    assert targets(confirmation) == selected, confirmation.content.decode()
    response = client.post(page, {**asked, "confirmed": "yes", "reason": "why", **values}, follow=True)
    assert response.status_code == 200
    return unescape(response.content.decode())


def log() -> list[tuple[str, str, str]]:
    """Return user, lock name and text of each log entry of Django's."""
    entries = apps.get_model("admin.LogEntry").objects.order_by("pk")
    return [(one.user.get_username(), one.object_id, one.get_change_message()) for one in entries]
