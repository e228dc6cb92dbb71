"""``@singleton_task``, which defines a task that runs once at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar, overload

from celery import Celery, Task, shared_task
from celery.local import Proxy

from ..errors import InvalidLockOptions
from ..keys.key_spec import KeySpec
from ..lock import Lock
from ..locking.lease import BypassLease, Lease, NullLease
from ..options.error_texts import ALL_OPTIONS
from ..options.lock_options import LockOptions
from ..options.other_libraries import equivalent
from ..options.overrides import overridden
from ..store.operator_model import RunView
from ..utils.text import did_you_mean
from .base import SingletonTask
from .definition_checks import task_signature

__all__ = ["TypedTask", "singleton_task"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)

#: Keywords of ``app.task`` that are not attributes of Celery's task class.
_CELERY_KEYWORDS: Final = frozenset({
    "autoretry_for", "base", "bind", "compression", "delivery_mode", "dont_autoretry_for", "exchange", "expires",
    "filter", "immediate", "lazy", "mandatory", "name", "priority", "pydantic", "pydantic_context",
    "pydantic_dump_kwargs", "pydantic_strict", "queue", "retry_backoff", "retry_backoff_max", "retry_jitter",
    "retry_kwargs", "routing_key", "shared", "soft_time_limit", "time_limit",
})  # fmt: skip


class TypedTask(Protocol[P, R_co]):
    """A singleton task as a type checker sees it, made from a function ``(P) -> R``."""

    name: str
    lock_options: LockOptions

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def delay(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    def lock_name(self, *args: P.args, **kwargs: P.kwargs) -> str: ...
    def lock_for(self, *args: P.args, **kwargs: P.kwargs) -> Lock: ...
    def used(self, *args: P.args, **kwargs: P.kwargs) -> RunView | None: ...
    def forget(self, *args: P.args, **kwargs: P.kwargs) -> bool: ...
    # Python's types cannot add the keyword `sent` to the function's signature, so this accepts any arguments.
    def resolve(self, *args: Any, sent: bool, **kwargs: Any) -> bool: ...
    @property
    def lease(self) -> Lease | BypassLease | NullLease: ...

    # Celery's own methods, which take any arguments.
    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any: ...
    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any: ...
    def s(self, *args: Any, **kwargs: Any) -> Any: ...
    def si(self, *args: Any, **kwargs: Any) -> Any: ...
    def signature(self, args: Any = None, **options: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...


@overload
def singleton_task(function: Callable[P, R], /) -> TypedTask[P, R]: ...
@overload
def singleton_task(
    *, bind: Literal[True], app: Celery | None = None, **options: Any
) -> Callable[[Callable[Concatenate[S, P], R]], TypedTask[P, R]]: ...
@overload
def singleton_task(*, app: Celery | None = None, **options: Any) -> Callable[[Callable[P, R]], TypedTask[P, R]]: ...
def singleton_task(*args: Any, app: Celery | None = None, **options: Any) -> Any:
    """Define a task that runs once at a time, as ``shared_task`` or, with ``app=``, ``app.task`` defines one.

    The worker acquires a lock before the body and releases it when the body ends. The lock's name comes from the task
    and its arguments, or from ``key``. A call that meets a held lock is skipped, unless ``on_conflict`` says otherwise.
    If the worker's host dies, the lock expires after ``ttl``, by default 30 seconds.

    Use it as the only task decorator of the function, with or without parentheses::

        @singleton_task(app=app, key="sms:{user_id}", on_conflict="queue")
        def send_sms(user_id: int, text: str) -> None: ...

    Args:
        args: The function, if the decorator is used without parentheses.
        app: The app that the task belongs to. By default every app gets it, as with ``shared_task``.
        options: Fields of :class:`celery_dlock.LockOptions`, which override those of the base's ``lock_options``.
            All other keywords go to Celery's decorator. ``base`` must derive from :class:`celery_dlock.SingletonTask`.

    Returns:
        The task. Type checkers see the function's own signature.

    Raises:
        InvalidLockOptions: A keyword is unknown, or an option's value is invalid. The error names the task, the option
            and the expected value.
    """
    if args and (len(args) > 1 or not callable(args[0])):
        given = ", ".join(map(repr, args))
        raise InvalidLockOptions(
            f"invalid @singleton_task({given}): expected @singleton_task, or options by keyword only, such as "
            "@singleton_task(app=app, ttl=30)"
        )
    if args:
        return _define(args[0], app, options)
    return lambda function: _define(function, app, options)


def _define(function: Callable[..., Any], app: Celery | None, options: dict[str, Any]) -> Any:
    name = options.get("name") or f"{function.__module__}.{function.__name__}"
    chosen = {key: value for key, value in options.items() if key in LockOptions.names()}
    for_celery = {key: value for key, value in options.items() if key not in chosen}
    base = for_celery.pop("base", None) or SingletonTask
    try:
        _check_function_and_app(function, app)
        _check_celery_options(for_celery, base)
        lock_options = overridden(base.lock_options, chosen)
    except InvalidLockOptions as error:
        raise InvalidLockOptions(f"task {name!r}: {error}") from None
    signature = task_signature(name, function, bind=bool(options.get("bind")))
    # Check the key here, so that the traceback shows the definition. Celery creates a shared task only later.
    KeySpec(name, signature, lock_options.key, lock_options.scope)
    make: Any = app.task if app is not None else shared_task
    return make(base=base, dlock_chosen=chosen, **for_celery)(function)


def _check_function_and_app(function: object, app: object) -> None:
    # Look at the type only: any attribute access would evaluate the lazy task of another decorator.
    if issubclass(type(function), Task | Proxy):
        raise InvalidLockOptions("invalid body: it is a task already. Use @singleton_task alone, above the function")
    if app is not None and not isinstance(app, Celery):
        raise InvalidLockOptions(f"invalid app={app!r}: expected a Celery app, or none for a shared task")


def _hint(key: str) -> str:
    if key == "lock_options":
        return ": give its fields as keywords, or use app.task(base=SingletonTask, lock_options=...)"
    for_celery = (
        name for name in dir(Task) if not name.startswith("_") and not callable(inspect.getattr_static(Task, name))
    )
    return equivalent(key) or did_you_mean(key, (*LockOptions.names(), *_CELERY_KEYWORDS, *for_celery))


def _check_celery_options(options: dict[str, Any], base: object) -> None:
    for key in options:
        if key not in _CELERY_KEYWORDS and not hasattr(Task, key):
            raise InvalidLockOptions(f"unknown option {key!r}{_hint(key)}; {ALL_OPTIONS}")
    if not (isinstance(base, type) and issubclass(base, SingletonTask)):
        raise InvalidLockOptions(f"invalid base={base!r}: expected a subclass of SingletonTask")
    if not isinstance(base.lock_options, LockOptions):
        raise InvalidLockOptions(f"invalid base={base!r}: its lock_options={base.lock_options!r} is not a LockOptions")
