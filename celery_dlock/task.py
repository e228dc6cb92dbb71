"""SingletonTask: a task that runs once at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, Task, states
from celery.exceptions import TaskRevokedError
from celery.result import EagerResult

from . import execution
from .errors import InvalidLockOptions
from .execution import Execution
from .keys import KeySpec
from .lease import Lease, NullLease
from .lock import Lock
from .options import DEFAULT_TTL, LockOptions, as_seconds
from .records import Waiting
from .refusal import Skipped
from .runtime import Runtime

if TYPE_CHECKING:
    from typing_extensions import Self

    _Task = Task[..., Any]
else:
    _Task = Task

__all__ = ["SingletonTask"]

_NULL_LEASE: Final = NullLease()


class SingletonTask(_Task):
    """Base of tasks that run once at a time across all workers.

    The lock is taken before the body and given back however the body ends. A subclass may define ``before_start``,
    ``after_return`` and ``__call__`` as it likes, with or without ``super()``: the order is always acquire, its
    ``before_start``, body, its ``after_return``, release. A ``Request`` class of its own must derive from
    :class:`celery_dlock.worker.SingletonRequest`.

    A direct call (``task(...)``) runs the function and takes no lock, as it runs none of Celery's hooks either.
    """

    abstract = True
    Request = "celery_dlock.worker:SingletonRequest"
    lock_options: LockOptions = LockOptions()

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        task = super().__new__(cls)
        # The tracer reads these from the instance, so here they hold whatever a subclass defines.
        task.before_start = _acquiring(task, task.before_start)  # type: ignore[method-assign]  # this is the point
        task.after_return = _releasing(task, task.after_return)  # type: ignore[method-assign]  # likewise
        body = task.run
        task.run = _body(task, body)  # type: ignore[method-assign]  # likewise
        if not isinstance(cls.lock_options, LockOptions):
            raise InvalidLockOptions(f"task {cls.name}: lock_options={cls.lock_options!r}: allowed: a LockOptions")
        _refuse_stray_options(cls)
        if cls.name:
            task._lock_spec = _spec(cls.name, body, cls.lock_options)
        return task

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        # Named, not imported: a publisher has no use for the worker's room.
        app.steps["worker"].add("celery_dlock.worker:KeeperStep")
        bound = super().bind(app)
        if cls.track_started:
            # The tracer would store STARTED before it is known whether the body runs: over the stored end of a
            # message of which this is a copy. We store it once the lock is held.
            cls.stores_started, cls.track_started = True, False
        return bound

    # Defined so that the tracer looks for these hooks at all; the work is in the wrappers on the instance.

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None: ...

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None: ...

    # -- what users read

    @property
    def lease(self) -> Lease | NullLease:
        """The running execution's lease; a null lease in a direct call."""
        run = execution.current(self.request)
        return run.lease if run is not None and run.lease is not None else _NULL_LEASE

    def lock_name(self, *args: Any, **kwargs: Any) -> str:
        """The name of the lock that this call would take."""
        return self.lock_spec.name_of(args, kwargs).text

    def waiting(self, *args: Any, **kwargs: Any) -> Waiting:
        """Who waits, under ``on_conflict="queue"``, for the lock that this call would take."""
        return self.dlock.locker.waiting(self.lock_spec.name_of(args, kwargs))

    def lock_for(self, *args: Any, **kwargs: Any) -> Lock:
        """The lock that this call would take, for use outside a worker or inside a body (where it re-enters)."""
        return Lock(self.lock_spec.name_of(args, kwargs), app=self.app, ttl=self.lock_ttl)

    # -- what the other rooms read

    stores_started = False
    _lock_spec: KeySpec | None = None

    @property
    def lock_spec(self) -> KeySpec:
        if self._lock_spec is None:
            # A class-based task gets its name only when it is registered.
            self._lock_spec = _spec(self.name, self.run, self.lock_options)
        return self._lock_spec

    @property
    def lock_ttl(self) -> float:
        ttl = self.lock_options.ttl
        return self.dlock.settings.ttl if ttl is DEFAULT_TTL else as_seconds(ttl)

    @property
    def dlock(self) -> Runtime:
        return Runtime.of(self.app)

    # -- Celery's doors

    @property
    def __trace__(self) -> Any:
        return self._trace

    @__trace__.setter
    def __trace__(self, tracer: Any) -> None:
        # Celery sets the tracer here; after_return is not called on retry, ignore, reject and terminate, this is.
        self._trace = tracer and _guarded(tracer)

    _trace: Any = None

    def apply(self, *args: Any, **kwargs: Any) -> EagerResult[Any]:
        before = execution.running()
        state = None
        try:
            result = super().apply(*args, **kwargs)
            state = result.state
        finally:
            _last_door(before, final=state is not None, success=state == states.SUCCESS)
        if isinstance(result.result, Skipped):
            # Celery's eager tracer calls this IGNORED; the worker calls it REVOKED.
            error = TaskRevokedError(str(result.result))
            return EagerResult(result.id, error, states.REVOKED, name=self.name)
        return result

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        _leave(self)
        return super().retry(*args, **kwargs)

    def on_replace(self, sig: Any) -> Any:
        _leave(self)
        return super().on_replace(sig)


def _refuse_stray_options(cls: type[SingletonTask]) -> None:
    """Celery makes a class attribute of any keyword; an option given so would silently do nothing."""
    for ancestor in cls.__mro__[: cls.__mro__.index(SingletonTask)]:
        for option in LockOptions.names():
            if option in vars(ancestor):
                given = f"{option}={vars(ancestor)[option]!r}"
                raise InvalidLockOptions(
                    f"task {cls.name or cls.__name__}: {given} is not allowed here; "
                    f"allowed: lock_options=LockOptions({option}=...)"
                )


def _spec(name: str, body: Callable[..., Any], options: LockOptions) -> KeySpec:
    return KeySpec(name, inspect.signature(body), options.key, options.scope)


def _acquiring(task: SingletonTask, users: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(users)
    def before_start(task_id: str, args: Any, kwargs: Any) -> None:
        run = Execution(task)
        run.begin(args, kwargs)
        if not run.skipped:
            users(task_id, args, kwargs)

    return before_start


def _releasing(task: SingletonTask, users: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(users)
    def after_return(status: str, *args: Any, **kwargs: Any) -> None:
        # On a hard limit Celery calls this in the main process while the body still runs in the child. There is no
        # request and so no run there: nothing is released.
        run = execution.current(task.request)
        try:
            users(status, *args, **kwargs)
        finally:
            if run is not None:
                run.finish(final=True, success=status == states.SUCCESS and not run.skipped)

    return after_return


def _body(task: SingletonTask, run_body: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_body)
    def run(*args: Any, **kwargs: Any) -> Any:
        here = execution.current(task.request)
        if here is None:
            return run_body(*args, **kwargs)
        if here.skipped:
            return task.lock_options.skip_result
        here.depth += 1
        try:
            return run_body(*args, **kwargs)
        finally:
            here.depth -= 1
            # Callbacks, errbacks and the chain's next step are published between here and after_return. A body that
            # calls its own task comes by here too, and has not ended.
            if not here.depth:
                here.leave_if_followed()

    return run


def _guarded(tracer: Callable[..., Any]) -> Callable[..., Any]:
    def trace(*args: Any, **kwargs: Any) -> Any:
        before = execution.running()
        final = success = False
        try:
            result = tracer(*args, **kwargs)
            state = states.SUCCESS if result.info is None else result.info.state
            # Reject(requeue=True) comes back; every other way of returning stores or keeps its end.
            final = not (state == states.REJECTED and getattr(result.info.retval, "requeue", False))
            success = state == states.SUCCESS
            return result
        finally:
            try:
                _last_door(before, final=final, success=success)
            except BaseException:
                # No door comes after this one, so whatever struck in it must not leave its work undone.
                _last_door(before, final=final, success=success)
                raise

    return trace


def _last_door(before: Execution | None, *, final: bool, success: bool) -> None:
    run = execution.running()
    if run is not None and run is not before:
        run.finish(final=final, success=success and not run.skipped)


def _leave(task: SingletonTask) -> None:
    run = execution.current(task.request)
    if run is not None:
        run.leave()
