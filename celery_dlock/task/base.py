"""SingletonTask: a task that runs once at a time."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Signature
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, Task, states
from celery.exceptions import Ignore, Retry, TaskRevokedError
from celery.result import AsyncResult, EagerResult

from ..config.celery_reports import mask_secrets
from ..errors import InvalidLockOptions
from ..keys.key_spec import KeySpec
from ..lock import Lock
from ..locking.lease import BypassLease, Lease, NullLease
from ..messaging.message_times import with_sent_time
from ..messaging.tick_header import HEADER as TICK_HEADER
from ..options.lock_options import DEFAULT_TTL, LockOptions
from ..runtime import Runtime
from ..store.operator_model import RunView, Waiting
from . import hooks, once_per, unique
from .call_options import (
    ARGUMENT,
    OPTIONS_HEADER,
    Call,
    headers_for,
    options_of,
    reject_argument_of_body,
    reject_misplaced_options,
)
from .definition import apply_decorator_options, inherit_app_task, warn_of_lost_calls
from .definition_checks import check_features, reject_stray_attributes, task_signature
from .execution import current
from .outcomes import HandledElsewhere, SelfReplaced, Skipped
from .unique_groups import patch_group_publishing

if TYPE_CHECKING:
    from typing_extensions import Self

    _Task = Task[..., Any]
else:
    _Task = Task

__all__ = ["SingletonTask"]

_NULL_LEASE: Final = NullLease()
#: Headers that belong to the call, and therefore to its retries.
_CALL_HEADERS: Final = (OPTIONS_HEADER, TICK_HEADER)


class SingletonTask(_Task):
    """Base class of tasks that run once at a time across all workers.

    The worker acquires the lock before the body and releases it when the body ends, however it ends. The order is
    always: acquire, the subclass's ``before_start``, body, the subclass's ``after_return``, release. A subclass may
    override these methods and ``__call__``, with or without calling ``super()``.

    If the worker's host dies, the lock expires after its ``ttl``. If the lease is lost while the body runs, another
    worker may run the same call: check :attr:`lease`, or set ``on_lost="abort"``.

    A direct call (``task(...)``) runs the function and takes no lock. Celery calls none of its hooks either.

    A subclass must not define the options of :class:`celery_dlock.LockOptions` as attributes: Celery would ignore
    them. A subclass's ``Request`` must derive from ``celery_dlock.worker.SingletonRequest``. A violation raises
    :exc:`celery_dlock.InvalidLockOptions` when the task is defined.
    """

    abstract = True
    Request = "celery_dlock.worker:SingletonRequest"
    Strategy = "celery_dlock.worker.strategy:default"
    #: How the task is locked. Default: one lock for each combination of task and arguments.
    lock_options: LockOptions = LockOptions()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_decorated" in vars(cls):
            inherit_app_task(vars(cls)["app"], cls)
            apply_decorator_options(cls)

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        task = super().__new__(cls)
        # Wrap on the instance: the tracer reads the methods from there, so a subclass cannot bypass the wrappers.
        # SingletonTask's own before_start and after_return only call super(). If no subclass overrides them, skip them.
        inherited: Any = super(SingletonTask, task)
        before_start, after_return = task.before_start, task.after_return
        if cls.before_start is SingletonTask.before_start:
            before_start = inherited.before_start
        if cls.after_return is SingletonTask.after_return:
            after_return = inherited.after_return
        task.before_start = hooks.wrap_before_start(task, before_start)  # type: ignore[method-assign]
        task.after_return = hooks.wrap_after_return(task, after_return)  # type: ignore[method-assign]
        body = task.run
        task.run = hooks.wrap_body(task, body)  # type: ignore[method-assign]
        name = str(cls.name or cls.__name__)
        if not isinstance(cls.lock_options, LockOptions):
            raise InvalidLockOptions(
                f"task {cls.name!r}: invalid lock_options={cls.lock_options!r}: expected a LockOptions"
            )
        reject_stray_attributes(name, cls.__mro__[: cls.__mro__.index(SingletonTask)])
        warn_of_lost_calls(name, cls.lock_options)
        task._signature = task_signature(name, body)
        if cls.name:
            task.lock_spec  # noqa: B018  # made, and checked, at its first use
        return task

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        # By name: a publisher must not import the worker package.
        app.steps["worker"].add("celery_dlock.worker:SingletonStep")
        bound = super().bind(app)
        mask_secrets(app)
        # Check now, in case the app is configured already. The worker checks again at its start.
        check_features(app.conf.get("dlock_url"), cls.lock_options, cls.name)
        if cls.track_started:
            # The tracer stores STARTED before the body is known to run: for a duplicate delivery, it would overwrite
            # the stored end. Store it when the lock is held instead.
            cls.stores_started, cls.track_started = True, False
        return bound

    # Defined because the tracer calls only hooks that a class overrides. The wrappers on the instance do the work.
    # super() reaches the app's own task class, which may define them too.

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        super().before_start(task_id, args, kwargs)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        super().after_return(status, retval, task_id, args, kwargs, einfo)

    # -- run-time API

    @property
    def lease(self) -> Lease | BypassLease | NullLease:
        """The lease of the running call, with its fencing token and whether the lock is still held.

        In a direct call, and in a call with ``dlock={"enabled": False}``, it is a null lease: its ``token`` is None and
        it is never lost. In a body that runs without its lock (``on_store_error="run"``), ``ensure()`` raises
        :exc:`celery_dlock.LockLost`.
        """
        run = current(self.request)
        return (run.lease or run.bypass or _NULL_LEASE) if run is not None else _NULL_LEASE

    def lock_name(self, *args: Any, **kwargs: Any) -> str:
        """Return the name of the lock that this call would take.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.

        Raises:
            LockKeyError: The arguments give no lock name.
        """
        return self.lock_spec.name_of(args, kwargs).text

    def lock_for(self, *args: Any, **kwargs: Any) -> Lock:
        """Return the lock that this call would take, to hold it outside a worker or to re-enter it inside the body.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.

        Raises:
            LockKeyError: The arguments give no lock name.
        """
        options = self.lock_options
        ttl = None if options.ttl is DEFAULT_TTL else options.ttl
        return Lock(self.lock_spec.name_of(args, kwargs), app=self.app, ttl=ttl)

    def waiting(self, *args: Any, **kwargs: Any) -> Waiting:
        """Return the calls that wait for this call's lock under ``on_conflict="queue"``.

        The answer holds for the moment it was read. It lists the first waiters only; its ``count`` is complete.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.

        Raises:
            LockKeyError: The arguments give no lock name.
            StoreUnavailable: The store did not answer.
        """
        name = self.lock_spec.name_of(args, kwargs)
        return self.dlock.lock_client.waiting(name) if self.dlock.enabled else Waiting(name.text, 0, ())

    # The next three take the ``dlock={...}`` of a call that chose a key or window of its own.

    def used(self, *args: Any, **kwargs: Any) -> RunView | None:
        """Return the last run of this call's name under ``once_per``, running or ended.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments, and its ``dlock={...}`` if it had one.

        Returns:
            The last run, with the state ``"used"``, ``"unknown"`` or ``"running"``. None if no state applies.

        Raises:
            LockKeyError: The arguments give no lock name.
            StoreUnavailable: The store did not answer.
        """
        return once_per.last_run(self, args, kwargs)

    def forget(self, *args: Any, **kwargs: Any) -> bool:
        """Delete the run mark of this call's name, so that the next call runs, however the last run ended.

        The next run has a new ``lease.idempotency_key``. If the last run did its work, that work is done twice: look
        first, and prefer :meth:`resolve` after a crash.

        A body that is running keeps its lock, and its success marks the name again. If it dies, its outcome is not
        reported as unknown.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments, and its ``dlock={...}`` if it had one.

        Returns:
            False if there was no mark.

        Raises:
            LockKeyError: The arguments give no lock name.
            StoreUnavailable: The store did not answer. Call it again.
        """
        return once_per.forget(self, args, kwargs)

    def resolve(self, *args: Any, sent: bool, **kwargs: Any) -> bool:
        """Record the outcome of a run whose process died, under ``once_per``.

        With ``after_crash="hold"``, calls of the name fail with :exc:`celery_dlock.UnknownOutcome` until then. Find out
        first whether the run did its work: a wrong answer repeats the work or drops it.

        If the task's function has an argument named ``sent``, pass that one by position.

        Args:
            args: The call's positional arguments.
            sent: True if the run did its work: the name is used for ``once_per`` from now on. False if it did not:
                the next call runs, with the same ``lease.idempotency_key``.
            kwargs: The call's keyword arguments, and its ``dlock={...}`` if it had one.

        Returns:
            False if no run of the name has an unknown outcome, or if a body of the name is running.

        Raises:
            InvalidLockOptions: The task has no ``once_per``, or ``sent`` is not a bool.
            LockKeyError: The arguments give no lock name.
            StoreUnavailable: The store did not answer. Call it again.
        """
        return once_per.resolve(self, args, kwargs, sent=sent)

    # -- read by other modules of this package

    stores_started = False
    _signature: Signature
    _lock_spec: KeySpec | None = None
    _own_call: Call | None = None
    _runtime: Runtime | None = None

    @property
    def lock_spec(self) -> KeySpec:
        if self._lock_spec is None:
            # A class-based task gets its name when it is registered, after __new__.
            options = self.lock_options
            self._lock_spec = KeySpec(self.name, self._signature, options.key, options.scope, seats=options.limit)
        return self._lock_spec

    @property
    def own_call(self) -> Call:
        """The options of a call that has no ``dlock={...}``."""
        if self._own_call is None:
            self._own_call = Call(self.lock_options, self.lock_spec)
        return self._own_call

    @property
    def dlock(self) -> Runtime:
        if self._runtime is None:
            self._runtime = Runtime.of(self.app)
        return self._runtime

    # -- overrides of Celery's own methods

    @property
    def __trace__(self) -> Any:
        return self._trace

    @__trace__.setter
    def __trace__(self, tracer: Any) -> None:
        # Celery sets the tracer here. Unlike after_return, it runs for retry, ignore, reject and terminate too.
        self._trace = tracer and hooks.wrap_tracer(self, tracer)

    _trace: Any = None

    def apply_async(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """Publish a call, as Celery's ``apply_async`` does.

        With ``unique``, the call first claims its lock's name. If another call has the name, ``on_duplicate`` decides.

        Args:
            args: Celery's positional arguments.
            kwargs: Celery's options, and ``dlock``: a dict of options of :class:`celery_dlock.LockOptions` for this
                call alone. ``dlock={"enabled": False}`` runs the call without a lock. The setting
                ``dlock_call_options`` says which options a call may change.

        Raises:
            InvalidLockOptions: An option in ``dlock`` is unknown, not permitted, has an invalid value, or cannot be
                carried by a message. Or a lock option was given as a keyword of its own, outside ``dlock``.
            LockHeld: With ``unique`` and ``on_duplicate="raise"``: another call has the name.
            LockKeyError: With ``unique``: the arguments give no lock name.
            StoreUnavailable: With ``unique``: the store did not answer, and the call is not published.
        """
        reject_argument_of_body(self, args[1] if len(args) > 1 else kwargs.get("kwargs"))
        self._carry(kwargs)
        options = options_of(self, kwargs.get("headers"))
        check_features(self.app.conf.get("dlock_url"), options, self.name)
        if options is not None and options.on_conflict == "queue" and options.debounce is None:
            kwargs["headers"] = with_sent_time(kwargs)
        return unique.publish(self, super().apply_async, args, kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> EagerResult[Any]:
        """Run the call in this process under its lock, as Celery's ``apply`` does.

        An eager call has no message, so it cannot be retried or queued: it fails with
        :exc:`celery_dlock.LockHeld` under these policies.

        Args:
            args: Celery's positional arguments.
            kwargs: Celery's options, and ``dlock`` as for :meth:`apply_async`.

        Raises:
            InvalidLockOptions: As for :meth:`apply_async`.
        """
        self._carry(kwargs)
        result = hooks.trace_eagerly(super().apply, args, kwargs)
        if isinstance(result.result, Skipped | HandledElsewhere):
            # Celery's eager tracer reports IGNORED. A worker stores REVOKED, so report that here too.
            ignored = result.result
            error = ignored.error if isinstance(ignored, Skipped) else TaskRevokedError(str(ignored))
            return EagerResult(result.id, error, states.REVOKED, name=self.name)
        return result

    def _carry(self, options: dict[str, Any]) -> None:
        reject_misplaced_options(self, options)
        if (chosen := options.pop(ARGUMENT, None)) is not None:
            options["headers"] = headers_for(self, chosen, options.get("headers"))

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        reject_misplaced_options(self, kwargs)  # check first: an error inside Celery's retry rejects the message
        hooks.announce_end(self, retries=True)
        # A tracing tool may have replaced the headers that Celery collects.
        known = self.request.headers if isinstance(self.request.headers, Mapping) else {}
        own = {name: every[name] for every in (vars(self.request), known) for name in _CALL_HEADERS if name in every}
        if "headers" in kwargs or own.keys() - known.keys():
            # Celery sends these in place of the message's own headers. The retry must keep the call's options and tick.
            kwargs["headers"] = {**own, **(kwargs.get("headers", known) or {})}
        run = current(self.request)
        try:
            published = super().retry(*args, **kwargs)
        except Retry as error:
            if run is not None:
                run.reserve_for_retry(error)
            raise
        if run is not None:
            run.reserve_for_retry(published)
        return published

    def on_replace(self, sig: Any) -> Any:
        hooks.announce_end(self)
        try:
            return super().on_replace(sig)
        except Ignore as error:
            raise SelfReplaced(*error.args) from None


patch_group_publishing(lambda task: isinstance(task, SingletonTask))
