"""SingletonTask: a task that runs once at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, Task, states
from celery.exceptions import Ignore, Retry, TaskRevokedError
from celery.result import AsyncResult, EagerResult

from ..config.masking import mask_secrets
from ..config.settings import permissions_of
from ..errors import InvalidLockOptions
from ..keys.key_spec import KeySpec
from ..lock import Lock
from ..locking.lease import BypassLease, Lease, NullLease
from ..messaging import ticks
from ..options.lock_options import DEFAULT_TTL, LockOptions
from ..options.overrides import overridden
from ..options.permissions import Permissions
from ..runtime import Runtime
from ..store.model import LastRun, Waiting
from ..utils.log import logger
from . import hooks, once_per, unique
from .call_options import ARGUMENT, OPTIONS_HEADER, headers_for, options_of, reject_misplaced_options
from .execution import current
from .outcomes import HandledElsewhere, Replaced, Skipped
from .unique_groups import patch_group_publishing
from .validation import check_topology_support, reject_stray_attributes, task_signature

if TYPE_CHECKING:
    from typing_extensions import Self

    _Task = Task[..., Any]
else:
    _Task = Task

__all__ = ["SingletonTask"]

_NULL_LEASE: Final = NullLease()
#: What belongs to the call, and so to its retries.
_OWN_HEADERS: Final = (OPTIONS_HEADER, ticks.HEADER)


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
    Strategy = "celery_dlock.worker.strategy:default"
    lock_options: LockOptions = LockOptions()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_decorated" in vars(cls):
            _build_on_task_of(vars(cls)["app"], cls)
            _choose_lock_options(cls)

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        task = super().__new__(cls)
        # The tracer reads these from the instance, so here they hold whatever a subclass defines.
        task.before_start = hooks.wrap_before_start(task, task.before_start)  # type: ignore[method-assign]  # this is the point
        task.after_return = hooks.wrap_after_return(task, task.after_return)  # type: ignore[method-assign]  # likewise
        body = task.run
        task.run = hooks.wrap_body(task, body)  # type: ignore[method-assign]  # likewise
        if not isinstance(cls.lock_options, LockOptions):
            raise InvalidLockOptions(f"task {cls.name!r}: lock_options={cls.lock_options!r}: allowed: a LockOptions")
        reject_stray_attributes(str(cls.name or cls.__name__), cls.__mro__[: cls.__mro__.index(SingletonTask)])
        _warn_of_lost_calls(cls)
        signature = task_signature(str(cls.name or cls.__name__), body)
        if cls.name:
            task._lock_spec = KeySpec(cls.name, signature, cls.lock_options.key, cls.lock_options.scope)
        return task

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        # Named, not imported: a publisher has no use for the worker's room.
        app.steps["worker"].add("celery_dlock.worker:KeeperStep")
        bound = super().bind(app)
        mask_secrets(app)
        # As early as the app is configured; the worker looks again, because it may be configured later.
        check_topology_support(app.conf.get("dlock_url"), cls.lock_options, cls.name)
        if cls.track_started:
            # The tracer would store STARTED before it is known whether the body runs: over the stored end of a
            # message of which this is a copy. We store it once the lock is held.
            cls.stores_started, cls.track_started = True, False
        return bound

    # Defined so that the tracer looks for these hooks at all; the work is in the wrappers on the instance. The app's
    # task class, which follows in the method resolution order, may have hooks of its own.

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        super().before_start(task_id, args, kwargs)

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        super().after_return(status, retval, task_id, args, kwargs, einfo)

    # -- what users read

    @property
    def lease(self) -> Lease | BypassLease | NullLease:
        """The running execution's lease; a null lease in a direct call."""
        run = current(self.request)
        return (run.lease or run.bypass or _NULL_LEASE) if run is not None else _NULL_LEASE

    def lock_name(self, *args: Any, **kwargs: Any) -> str:
        """The name of the lock that this call would take."""
        return self.lock_spec.name_of(args, kwargs).text

    def waiting(self, *args: Any, **kwargs: Any) -> Waiting:
        """Who waits, under ``on_conflict="queue"``, for the lock that this call would take."""
        name = self.lock_spec.name_of(args, kwargs)
        return self.dlock.locker.waiting(name) if self.dlock.enabled else Waiting(0, ())

    # These three take the ``dlock={...}`` of a call that chose a key or a window of its own.

    def used(self, *args: Any, **kwargs: Any) -> LastRun | None:
        """Under ``once_per``: what became of the last run of this call's name; None if the name is free.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        return once_per.last_run(self, args, kwargs)

    def forget(self, *args: Any, **kwargs: Any) -> bool:
        """Make this call's name free at once, whatever became of its last run; false if there was nothing to forget.

        A body that runs just now goes on under its lock. Its success uses the name as ever; if it dies, nobody is told
        that its outcome is unknown. The next run's ``lease.idempotency_key`` is a new one.

        Raises:
            StoreUnavailable: The store did not answer.
        """
        return once_per.forget(self, args, kwargs)

    def resolve(self, *args: Any, sent: bool, **kwargs: Any) -> bool:
        """Settle what became of a run that died; false if there is none such, or the name's body runs just now.

        A task whose function has an argument ``sent`` takes that by its place here.

        Args:
            args: Of the call.
            sent: True: the run did its work, and the name is used for ``once_per`` from now. False: it did not, and
                the next call runs, with the same ``lease.idempotency_key``.
            kwargs: Of the call.

        Raises:
            InvalidLockOptions: The task has no ``once_per``, or ``sent`` is neither True nor False.
            StoreUnavailable: The store did not answer.
        """
        return once_per.resolve(self, args, kwargs, sent=sent)

    def lock_for(self, *args: Any, **kwargs: Any) -> Lock:
        """The lock that this call would take, for use outside a worker or inside a body (where it re-enters)."""
        options = self.lock_options
        ttl = None if options.ttl is DEFAULT_TTL else options.ttl
        return Lock(self.lock_spec.name_of(args, kwargs), app=self.app, ttl=ttl, durability=options.durability)

    # -- what the other rooms read

    stores_started = False
    _lock_spec: KeySpec | None = None

    @property
    def lock_spec(self) -> KeySpec:
        if self._lock_spec is None:
            # A class-based task gets its name only when it is registered.
            options = self.lock_options
            self._lock_spec = KeySpec(self.name, task_signature(self.name, self.run), options.key, options.scope)
        return self._lock_spec

    @property
    def lock_ttl(self) -> float:
        return self.lock_options.ttl_or(self.dlock.settings.ttl)

    @property
    def call_permissions(self) -> Permissions:
        return permissions_of(self.app)

    @property
    def locks_enabled(self) -> bool:
        return self.dlock.enabled

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
        self._trace = tracer and hooks.wrap_tracer(self, tracer)

    _trace: Any = None

    def apply_async(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """As Celery's, and ``dlock={...}``: this call's own options, and ``enabled``: False takes no lock.

        Raises:
            InvalidLockOptions: An option is unknown, has a value that is not allowed, cannot be carried, or is given
                beside ``dlock=``.
            LockHeld: With ``unique`` and ``on_duplicate="raise"``: the name is another call's.
            StoreUnavailable: With ``unique``: the store could not be asked; nothing is published.
        """
        self._carry(kwargs)
        check_topology_support(self.app.conf.get("dlock_url"), options_of(self, kwargs.get("headers")), self.name)
        return unique.publish(self, super().apply_async, args, kwargs)

    def apply(self, *args: Any, **kwargs: Any) -> EagerResult[Any]:
        self._carry(kwargs)
        result = hooks.trace_eagerly(super().apply, args, kwargs)
        if isinstance(result.result, Skipped | HandledElsewhere):
            # Celery's eager tracer calls this IGNORED; the worker calls it REVOKED.
            ignored = result.result
            error = ignored.error if isinstance(ignored, Skipped) else TaskRevokedError(str(ignored))
            return EagerResult(result.id, error, states.REVOKED, name=self.name)
        return result

    def _carry(self, options: dict[str, Any]) -> None:
        reject_misplaced_options(self, options)
        if (chosen := options.pop(ARGUMENT, None)) is not None:
            options["headers"] = headers_for(self, chosen, options.get("headers"))

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        reject_misplaced_options(self, kwargs)  # before Celery, which would reject the message because of it
        hooks.announce_end(self, retries=True)
        # A tracing tool may have put headers of its own in the place of those that Celery collects.
        known = self.request.headers if isinstance(self.request.headers, Mapping) else {}
        own = {name: every[name] for every in (vars(self.request), known) for name in _OWN_HEADERS if name in every}
        if "headers" in kwargs or own.keys() - known.keys():
            # Celery takes these instead of the message's own, and the retry would be another call.
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
            raise Replaced(*error.args) from None


def _build_on_task_of(app: Celery, cls: type[SingletonTask]) -> None:
    """Add the app's task class to the bases of a task that a decorator makes of a function.

    Celery takes ``app.Task`` where the decorator names no base. Only here is the app known: a shared task is made once
    for each app. A Django project's class brings ``delay_on_commit``.
    """
    inherited = [base for base in cls.__bases__ if not issubclass(app.Task, base)]
    if not issubclass(cls, app.Task):
        cls.__bases__ = (*inherited, app.Task)


def _choose_lock_options(cls: type[SingletonTask]) -> None:
    """Override the inherited ``lock_options`` by the keywords of ``@singleton_task``.

    Not in the decorator: the app's task class, which may be a singleton with options of its own, is known only now.
    """
    chosen = vars(cls).get("dlock_chosen")
    try:
        if chosen:
            cls.lock_options = overridden(cls.lock_options, chosen)
    except InvalidLockOptions as error:
        raise InvalidLockOptions(f"task {cls.name!r}: {error}") from None


def _warn_of_lost_calls(cls: type[SingletonTask]) -> None:
    if cls.lock_options.loses_published_calls:
        logger.warning(
            "task %r: unique='queued' publishes a call while the first one runs, and on_conflict=%r then skips it: "
            "set on_conflict='retry' or 'queue', or unique='queued+running'",
            cls.name or cls.__name__, cls.lock_options.on_conflict,
        )  # fmt: skip


patch_group_publishing(lambda task: isinstance(task, SingletonTask))
