"""@singleton_task: define a task that runs once at a time."""

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
from ..options.lock_options import LockOptions
from ..options.other_libraries import equivalent
from ..options.overrides import overridden
from ..options.validation import did_you_mean
from ..store.model import LastRun
from .base import SingletonTask
from .validation import task_signature

__all__ = ["TypedTask", "singleton_task"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
R_co = TypeVar("R_co", covariant=True)

#: Keywords of ``app.task`` that are not attributes of Celery's task class.
_CELERYS: Final = frozenset({
    "autoretry_for", "base", "bind", "compression", "delivery_mode", "dont_autoretry_for", "exchange", "expires",
    "filter", "immediate", "lazy", "mandatory", "name", "priority", "pydantic", "pydantic_context",
    "pydantic_dump_kwargs", "pydantic_strict", "queue", "retry_backoff", "retry_backoff_max", "retry_jitter",
    "retry_kwargs", "routing_key", "shared", "soft_time_limit", "time_limit",
})  # fmt: skip


class TypedTask(Protocol[P, R_co]):
    """A singleton task made of a function ``(P) -> R``."""

    name: str
    lock_options: LockOptions

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    def delay(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    def lock_name(self, *args: P.args, **kwargs: P.kwargs) -> str: ...
    def lock_for(self, *args: P.args, **kwargs: P.kwargs) -> Lock: ...
    def used(self, *args: P.args, **kwargs: P.kwargs) -> LastRun | None: ...
    def forget(self, *args: P.args, **kwargs: P.kwargs) -> bool: ...
    # A signature and a keyword of our own cannot stand beside each other in a type.
    def resolve(self, *args: Any, sent: bool, **kwargs: Any) -> bool: ...
    @property
    def lease(self) -> Lease | BypassLease | NullLease: ...

    # Celery's own names, which take any arguments.
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
    """Make a task that runs once at a time: like ``shared_task``, or ``app.task`` with ``app=``.

    Args:
        args: The function, where the decorator is used without parentheses.
        app: The app to define the task on; by default every app gets it, as with ``shared_task``.
        options: Any field of :class:`LockOptions`, which overrides that field of the base's ``lock_options``;
            everything else goes to Celery.

    Raises:
        InvalidLockOptions: A keyword is neither Celery's nor ours, or has a value that is not allowed.
    """
    if args and (len(args) > 1 or not callable(args[0])):
        given = ", ".join(map(repr, args))
        raise InvalidLockOptions(
            f"@singleton_task({given}) is not allowed; allowed: @singleton_task, or options by keyword only, such as "
            "@singleton_task(app=app, ttl=30)"
        )
    if args:
        return _define(args[0], app, options)
    return lambda function: _define(function, app, options)


def _define(function: Callable[..., Any], app: Celery | None, options: dict[str, Any]) -> Any:
    name = options.get("name") or f"{function.__module__}.{function.__name__}"
    chosen = {key: value for key, value in options.items() if key in LockOptions.names()}
    celerys = {key: value for key, value in options.items() if key not in chosen}
    base = celerys.pop("base", None) or SingletonTask
    try:
        _check_places(function, app)
        _check_celerys(celerys, base)
        lock_options = overridden(base.lock_options, chosen)
    except InvalidLockOptions as error:
        raise InvalidLockOptions(f"task {name!r}: {error}") from None
    signature = task_signature(name, function, bind=bool(options.get("bind")))
    # A shared task is made only when an app is finalized; its key is checked here, where the author can see it.
    KeySpec(name, signature, lock_options.key, lock_options.scope)
    make: Any = app.task if app is not None else shared_task
    return make(base=base, dlock_chosen=chosen, **celerys)(function)


def _check_places(function: object, app: object) -> None:
    # By its type: to ask the task of another decorator what it is would make it.
    if issubclass(type(function), Task | Proxy):
        raise InvalidLockOptions("a task is not allowed as a body; allowed: @singleton_task alone, above the function")
    if app is not None and not isinstance(app, Celery):
        raise InvalidLockOptions(f"app={app!r} is not allowed; allowed: a Celery app, or none for a shared task")


def _meant(key: str) -> str:
    if key == "lock_options":
        return ": give its fields as keywords, or use app.task(base=SingletonTask, lock_options=...)"
    celerys = (
        name for name in dir(Task) if not name.startswith("_") and not callable(inspect.getattr_static(Task, name))
    )
    return equivalent(key) or did_you_mean(key, (*LockOptions.names(), *_CELERYS, *celerys))


def _check_celerys(options: dict[str, Any], base: object) -> None:
    for key in options:
        if key not in _CELERYS and not hasattr(Task, key):
            raise InvalidLockOptions(f"unknown option {key!r}{_meant(key)}; ours are {', '.join(LockOptions.names())}")
    if not (isinstance(base, type) and issubclass(base, SingletonTask)):
        raise InvalidLockOptions(f"base={base!r} is not allowed; allowed: a subclass of SingletonTask")
    if not isinstance(base.lock_options, LockOptions):
        raise InvalidLockOptions(f"base={base!r} has lock_options={base.lock_options!r}; allowed: a LockOptions")
