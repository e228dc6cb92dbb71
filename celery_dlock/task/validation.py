"""Checks of a task when it is defined: its body, its signature, and its options on the configured servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Signature, isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction, signature
from types import MethodType
from typing import Any, Final

from ..errors import InvalidLockOptions
from ..options.lock_options import LockOptions
from ..options.other_libraries import UNMISTAKABLE, equivalent

__all__ = ["check_topology_support", "reject_stray_attributes", "task_signature"]

#: Where Celery wraps a body for ``pydantic=True``: its wrapper is a plain function whatever the body is.
_WRAPPING: Final = "celery.app.base"
#: Attributes of :class:`SingletonTask` that a subclass must not hide: the lock's own work and its public interface.
_RESERVED: Final = frozenset({
    "dlock", "forget", "lease", "lock_for", "lock_name", "lock_spec", "lock_ttl", "locks_enabled", "resolve", "used",
    "waiting",
})  # fmt: skip
_WHERE: Final = "where dlock_url names several servers (Redlock)"
_QUEUE: Final = f"{_WHERE}: none of them knows the order of the waiters; allowed: 'skip', 'retry', 'wait', 'raise'"
_CLAIMS: Final = f"{_WHERE}: they keep no claims of queued calls; allowed: None"


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


def check_topology_support(urls: Any, options: LockOptions | None, task: str | None) -> None:
    """Check a task's, or a call's, options against ``dlock_url``.

    Args:
        urls: That setting.
        options: The options; None for a call without a lock.
        task: The task's name.

    Raises:
        InvalidLockOptions: One of them cannot be had there.
    """
    if options is None or not isinstance(urls, list | tuple):
        return
    unfit = {
        "on_conflict": _QUEUE if options.on_conflict == "queue" else "",
        "unique": _CLAIMS if options.claims else "",
    }
    for option, why in unfit.items():
        if why:
            raise InvalidLockOptions(f"task {task!r}: {option}={getattr(options, option)!r} is not allowed {why}")


def reject_stray_attributes(task: str, classes: Iterable[type]) -> None:
    """Check the attributes of a task's classes. Celery makes an attribute of any keyword, which then does nothing.

    Args:
        task: The task's name, for errors.
        classes: The task's class and its bases up to :class:`SingletonTask`.

    Raises:
        InvalidLockOptions: An attribute is a lock option, an option of another library, or reserved.
    """
    for attributes in map(vars, classes):
        for option in LockOptions.names():
            if option in attributes:
                raise InvalidLockOptions(
                    f"task {task!r}: {option}={attributes[option]!r} is not allowed here; "
                    f"allowed: lock_options=LockOptions({option}=...)"
                )
        for reserved in _RESERVED & attributes.keys():
            raise InvalidLockOptions(
                f"task {task!r}: the attribute {reserved!r} is reserved for SingletonTask's own; allowed: another name"
            )
        for option in UNMISTAKABLE:
            if option in attributes:
                raise InvalidLockOptions(
                    f"task {task!r}: unknown option {option!r}{equivalent(option)}, in lock_options=LockOptions(...)"
                )
