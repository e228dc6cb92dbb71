"""The strategy with which a worker's main process receives the messages of a singleton task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.exceptions import InvalidTaskError
from celery.worker.strategy import default as celery_default

from ..messaging.validation import MALFORMED

__all__ = ["default"]

_BODY_TYPES = (list, tuple, dict)


def default(task: Any, app: Any, consumer: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return Celery's default strategy with a check that the body of a message is a container.

    Celery looks for a key in the decoded body before it makes the request. There, a body such as ``5`` raises
    TypeError, which ends the worker.
    """
    handle = celery_default(task, app, consumer, **kwargs)

    def on_message(message: Any, body: Any, *args: Any, **options: Any) -> Any:
        try:
            payload = message.payload
        except MALFORMED as error:
            raise InvalidTaskError(f"malformed message: {type(error).__name__}: {error}") from error
        if not isinstance(payload, _BODY_TYPES):
            raise InvalidTaskError("malformed message: expected [args, kwargs, embed] as its body")
        return handle(message, body, *args, **options)

    return on_message
