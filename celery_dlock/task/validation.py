"""What may be the body of a task, and with which arguments it is called."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction, signature
from types import MethodType
from typing import Any, Final

from ..errors import InvalidLockOptions

__all__ = ["task_signature"]

#: Where Celery wraps a body for ``pydantic=True``: its wrapper is a plain function whatever the body is.
_WRAPPING: Final = "celery.app.base"


def task_signature(task: str, body: Callable[..., Any], *, bind: bool = False) -> Signature:
    """The signature by which a task is called.

    Args:
        task: The task's name, for errors.
        body: Its function, or its bound ``run``.
        bind: The function takes the task as its first argument, which is left out here.

    Raises:
        InvalidLockOptions: Celery would call it and it would not run, or it takes no first argument for the task.
    """
    if isclass(body):
        raise InvalidLockOptions(
            f"task {task!r}: the class {body.__name__} is not allowed as a body; allowed: a function, or "
            f"app.register_task({body.__name__}()) of a class that derives from SingletonTask and has a run method"
        )
    if _is_async(body):
        # Celery takes the coroutine for the result: the task would succeed, and its name be used, without a run.
        raise InvalidLockOptions(
            f"task {task!r}: an async def body is not allowed: Celery never awaits it; allowed: a plain function that "
            "runs it, by asyncio.run(...) or asgiref's async_to_sync"
        )
    if isgeneratorfunction(body):
        raise InvalidLockOptions(
            f"task {task!r}: a body with yield is not allowed: Celery never runs it; allowed: a function that returns"
        )
    try:
        return signature(MethodType(body, task) if bind else body)
    except ValueError:
        raise InvalidLockOptions(
            f"task {task!r}: {getattr(body, '__name__', body)}() has no argument for the task itself; "
            "allowed: self as its first argument, or a function without bind=True"
        ) from None


def _is_async(body: Any) -> bool:
    while getattr(body, "__globals__", {}).get("__name__") == _WRAPPING:
        body = body.__wrapped__
    called = type(body).__call__  # of an object that is called like a function
    return any(iscoroutinefunction(each) or isasyncgenfunction(each) for each in (body, called))
