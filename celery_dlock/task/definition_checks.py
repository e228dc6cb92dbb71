"""Checks of a task when it is defined: its body, its signature, and its options on the configured servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Signature, isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction, signature
from types import MethodType
from typing import Any, Final

from ..errors import InvalidLockOptions
from ..options.lock_options import LockOptions
from ..options.other_libraries import UNMISTAKABLE, equivalent
from ..store.features import features_of

__all__ = ["check_features", "reject_stray_attributes", "task_signature"]

#: The module in which Celery wraps a body for ``pydantic=True``, always with a plain function.
_WRAPPING: Final = "celery.app.base"
#: Attributes of :class:`SingletonTask` that a subclass must not hide: the lock's own work and its public interface.
_RESERVED: Final = frozenset({
    "dlock", "forget", "lease", "lock_for", "lock_name", "lock_spec", "own_call",
    "resolve", "used", "waiting",
})  # fmt: skip


def task_signature(task: str, body: Callable[..., Any], *, bind: bool = False) -> Signature:
    """Return the signature by which a task is called.

    Args:
        task: The task's name, for errors.
        body: The task's function, or its bound ``run``.
        bind: The function takes the task as its first argument, which the signature leaves out.

    Raises:
        InvalidLockOptions: Celery would not run the body, or the body has no argument for the task.
    """
    if isclass(body):
        raise InvalidLockOptions(
            f"task {task!r}: invalid body: {body.__name__} is a class. Use a function, or "
            f"app.register_task({body.__name__}()) of a class that derives from SingletonTask and has a run method"
        )
    if _is_async(body):
        # Celery takes the coroutine as the result: the task would succeed, and use its name, without running.
        raise InvalidLockOptions(
            f"task {task!r}: invalid body: Celery never awaits an async def function. Use a plain function that runs "
            "it with asyncio.run(...) or asgiref's async_to_sync"
        )
    if isgeneratorfunction(body):
        raise InvalidLockOptions(
            f"task {task!r}: invalid body: Celery never runs a function with yield. Use a function that returns"
        )
    try:
        return signature(MethodType(body, task) if bind else body)
    except ValueError:
        raise InvalidLockOptions(
            f"task {task!r}: {getattr(body, '__name__', body)}() has no argument for the task itself. "
            "Add self as its first argument, or remove bind=True"
        ) from None


def _is_async(body: Any) -> bool:
    while getattr(body, "__globals__", {}).get("__name__") == _WRAPPING:
        body = body.__wrapped__
    called = type(body).__call__  # for an object with a __call__ method
    return any(iscoroutinefunction(each) or isasyncgenfunction(each) for each in (body, called))


def check_features(urls: Any, options: LockOptions | None, task: str | None) -> None:
    """Check that the store can do what the options of a task or call need.

    Args:
        urls: The setting ``dlock_url``.
        options: The options; None for a call without a lock.
        task: The task's name, for errors.

    Raises:
        InvalidLockOptions: It cannot.
    """
    if options is None or not isinstance(urls, list | tuple):
        return  # only a list of servers (Redlock) lacks what an option needs
    features = features_of(urls)
    for feature, needed, option, expected in (
        ("seats", options.limit > 1, "limit", "1"),
        ("queues", options.parks, "on_conflict", "'skip', 'retry' or 'raise'"),
        ("claims", options.claims, "unique", "None"),
    ):
        if needed:
            features.require(feature, f"task {task!r}: invalid {option}={getattr(options, option)!r}", expected)


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
                    f"task {task!r}: misplaced {option}={attributes[option]!r}: "
                    f"expected lock_options=LockOptions({option}=...)"
                )
        for reserved in _RESERVED & attributes.keys():
            raise InvalidLockOptions(
                f"task {task!r}: the attribute {reserved!r} is reserved for SingletonTask. Use another name"
            )
        for option in UNMISTAKABLE:
            if option in attributes:
                raise InvalidLockOptions(
                    f"task {task!r}: unknown option {option!r}{equivalent(option)}, in lock_options=LockOptions(...)"
                )
