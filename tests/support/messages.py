"""Messages with every option that Celery knows, and what must stay the same when the library publishes one again."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery.canvas import Signature

#: Serializers and compressions, in all combinations.
COMBINATIONS = [(s, c) for s in ("json", "pickle", "yaml") for c in (None, "zlib", "bzip2")]
CONTENT_TYPES = {
    "json": "application/json",
    "pickle": "application/x-python-serialize",
    "yaml": "application/x-yaml",
}


def send_with_every_option(signature: Signature[Any], headers: dict[str, Any], **options: Any) -> Any:
    """Publish a call with masked arguments, a priority, an expiry, time limits and headers of its own."""
    return signature.apply_async(
        argsrepr="('***',)",
        kwargsrepr="{'secret': '***'}",
        shadow="a shadow",
        priority=3,
        expires=60,
        time_limit=50,
        soft_time_limit=40,
        headers=headers,
        reply_to="somebody",
        **options,
    )


def body_of(message: Mapping[str, Any]) -> Any:
    """Return the arguments, keyword arguments and embedded canvas of a message in the broker."""
    data = base64.b64decode(message["body"])
    return json.loads(data) if message["content-type"] == CONTENT_TYPES["json"] else pickle.loads(data)


def assert_same_body_and_properties(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Compare two messages, apart from their headers and from properties that have to differ."""
    assert second["body"] == first["body"]
    for name in ("content-type", "content-encoding"):
        assert second[name] == first[name]
    before, after = dict(first["properties"]), dict(second["properties"])
    assert before.pop("delivery_tag") != after.pop("delivery_tag")
    # Celery writes these three a second time beside the headers, where its worker does not look for them.
    for name in ("argsrepr", "kwargsrepr", "periodic_task_name"):
        before.pop(name, None)
    # Milliseconds, so only what is left of them.
    left, whole = after.pop("expiration", None), before.pop("expiration", None)
    assert left == whole or 0 < int(left) < int(whole)
    assert after == before
