"""How a worker's main process takes a message of a singleton task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.exceptions import InvalidTaskError
from celery.worker.strategy import default as celerys

from ..messaging.validation import MALFORMED

__all__ = ["default"]

_BODY_TYPES = (list, tuple, dict)


def default(task: Any, app: Any, consumer: Any, **kwargs: Any) -> Callable[..., Any]:
    """Celery's default strategy, which also refuses a message whose body is no container.

    Celery looks for a key in the decoded body before it makes the request. A body such as ``5`` raises TypeError
    there, and ends the worker.
    """
    handle = celerys(task, app, consumer, **kwargs)

    def on_message(message: Any, body: Any, *args: Any, **options: Any) -> Any:
        try:
            payload = message.payload
        except MALFORMED as error:
            raise InvalidTaskError(f"malformed message: {type(error).__name__}: {error}") from error
        if not isinstance(payload, _BODY_TYPES):
            raise InvalidTaskError("malformed message: expected a body of [args, kwargs, embed]")
        return handle(message, body, *args, **options)

    return on_message
