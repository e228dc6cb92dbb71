"""The strategy with which a worker's main process receives the messages of a singleton task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.exceptions import InvalidTaskError
from celery.worker.strategy import default as celery_default

from ..messaging.message_checks import MALFORMED

__all__ = ["default"]

_BODY_TYPES = (list, tuple, dict)


def default(task: Any, app: Any, consumer: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return Celery's default strategy, wrapped so that it refuses a message whose body is no container.

    Celery looks for a key in the decoded body before it makes the request. There, a body such as ``5`` raises
    TypeError, which would end the worker. The body is checked only after such an error. A check in advance would slow
    down every message.
    """
    handle = celery_default(task, app, consumer, **kwargs)

    def on_message(message: Any, body: Any, *args: Any) -> Any:
        try:
            return handle(message, body, *args)
        except MALFORMED:
            _check_body(message)
            raise  # the body is readable, so the message is not the reason

    return on_message


def _check_body(message: Any) -> None:
    try:
        payload = message.payload
    except MALFORMED as error:
        raise InvalidTaskError(f"malformed message: {type(error).__name__}: {error}") from error
    if not isinstance(payload, _BODY_TYPES):
        raise InvalidTaskError("malformed message: expected [args, kwargs, embed] as its body")
