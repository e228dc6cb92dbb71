"""What one call chooses otherwise than its task: ``apply_async(args, dlock={...})``, carried by its message."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ..errors import InvalidLockOptions
from ..keys.key_spec import KeySpec
from ..keys.lock_name import LockName
from ..messaging.validation import MALFORMED
from ..options.lock_options import LockOptions
from ..options.other_libraries import UNMISTAKABLE, equivalent
from ..options.overrides import overridden
from ..options.permissions import ENABLED, Permissions
from ..utils.text import written

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import AsyncResult

    from ..runtime import Runtime

__all__ = [
    "ARGUMENT",
    "OPTIONS_HEADER",
    "Call",
    "Called",
    "LockedTask",
    "call_of",
    "headers_for",
    "options_of",
    "reject_misplaced_options",
]

#: The argument of ``apply_async`` and ``apply``, and the option of a signature.
ARGUMENT: Final = "dlock"
#: The message's header. Celery copies it into the task's own retries, which are the same call.
OPTIONS_HEADER: Final = "dlock_call"
_OPTIONS: Final = frozenset(LockOptions.names())
_FOREIGN: Final = frozenset(UNMISTAKABLE)


class Called(Protocol):
    """The task, as far as it matters here."""

    name: str
    lock_options: LockOptions

    @property
    def run(self) -> Any: ...
    @property
    def locks_enabled(self) -> bool: ...
    @property
    def lock_spec(self) -> KeySpec: ...
    @property
    def call_permissions(self) -> Permissions: ...


class LockedTask(Called, Protocol):
    """The task, as far as publishing and running it need it. :class:`~celery_dlock.SingletonTask` implements it."""

    acks_late: bool
    ignore_result: bool
    serializer: str
    store_eager_result: bool
    #: Store STARTED once the lock is held (``track_started``).
    stores_started: bool
    typing: bool

    @property
    def app(self) -> Celery: ...
    @property
    def backend(self) -> Any: ...
    @property
    def dlock(self) -> Runtime: ...
    @property
    def request(self) -> Any: ...
    def AsyncResult(self, task_id: str) -> AsyncResult[Any]: ...  # noqa: N802  # Celery's name
    def send_event(self, *args: Any, **fields: Any) -> Any: ...


class Call(NamedTuple):
    """One call's options.

    Args:
        options: The task's, with what the call chose instead.
        spec: How the call is named.
        enabled: False: it takes no lock.
    """

    options: LockOptions
    spec: KeySpec
    enabled: bool = True

    def name_of(self, args: Any, kwargs: Any) -> LockName:
        return self.spec.name_of(args, kwargs)


def call_of(task: Called, headers: Mapping[str, Any] | None) -> Call:
    """The options of a call, by the headers of its message.

    Raises:
        InvalidLockOptions: The header is not ours, or names what this worker's task does not allow.
    """
    header = (headers or {}).get(OPTIONS_HEADER)
    if not task.locks_enabled:
        return Call(task.lock_options, task.lock_spec, enabled=False)
    if header is None:
        return Call(task.lock_options, task.lock_spec)
    whose, chosen = _read(header)
    if chosen is None:
        raise InvalidLockOptions(
            f"task {task.name!r}: the header {OPTIONS_HEADER!r} was not made by apply_async(dlock={{...}})"
        )
    if whose != task.name:
        return Call(task.lock_options, task.lock_spec)  # somebody passed another task's headers on
    try:
        return _checked(task, chosen)
    except InvalidLockOptions:
        raise
    except MALFORMED as error:  # a value that no check expects
        raise _wrong(task, f"the header {OPTIONS_HEADER!r} is malformed: {type(error).__name__}") from error


def options_of(task: Called, headers: Mapping[str, Any] | None) -> LockOptions | None:
    """The options of a call that is about to be published; None where it takes no lock, or a worker will refuse it."""
    if OPTIONS_HEADER not in (headers or ()):
        return task.lock_options
    try:
        call = call_of(task, headers)
    except InvalidLockOptions:
        return None
    return call.options if call.enabled else None


def _read(header: Any) -> tuple[Any, Mapping[Any, Any] | None]:
    """Of which task, and what was chosen; None where the header is not ours."""
    try:
        whose, chosen = header["task"], json.loads(header["options"])
    except (TypeError, ValueError, LookupError, RecursionError):
        return None, None
    return whose, chosen if isinstance(chosen, Mapping) else None


def reject_misplaced_options(task: Called, given: Mapping[str, Any]) -> None:
    """Celery takes any keyword beside a call's arguments; an option of ours given so would silently do nothing.

    Args:
        task: The task that is called.
        given: What stands beside its arguments. A stamp of the user's may have any name.

    Raises:
        InvalidLockOptions: One of them is an option's name, or that of another lock library's. None of these is
            Celery's or kombu's.
    """
    for option in given.keys() & _FOREIGN:
        if option not in (given.get("stamped_headers") or ()):
            raise _wrong(task, f"unknown option {option!r}{equivalent(option)}")
    for option in given.keys() & _OPTIONS:
        if option not in (given.get("stamped_headers") or ()):
            value = given[option]
            raise _wrong(task, f"{option}={value!r} is not allowed here; allowed: {ARGUMENT}={{{option!r}: {value!r}}}")


def headers_for(task: Called, chosen: Any, headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """The headers of a message that carries what its call chose.

    Args:
        task: The task that is called.
        chosen: What was given as ``dlock=``.
        headers: The message's other headers.

    Raises:
        InvalidLockOptions: An option is unknown, has a value that is not allowed, or cannot be carried by a message.
    """
    if not isinstance(chosen, Mapping):
        raise _wrong(task, f"dlock={chosen!r} is not allowed; allowed: a dict of options")
    call = _checked(task, chosen)
    carried = {name: call.enabled if name == ENABLED else _plain(getattr(call.options, name)) for name in chosen}
    for name, value in carried.items():
        if not _survives(value):
            raise _wrong(task, f"dlock: {name}={value!r} cannot be carried by a message; allowed: what JSON holds")
    # As text: a broker's own headers hold less than JSON does (AMQP: no long keys, no large numbers).
    return {**(headers or {}), OPTIONS_HEADER: {"task": task.name, "options": json.dumps(carried)}}


def _checked(task: Called, chosen: Mapping[Any, Any]) -> Call:
    _refuse_unknown(task, chosen)
    enabled = chosen.get(ENABLED, True)
    if not isinstance(enabled, bool):
        raise _wrong(task, f"dlock: {ENABLED}={written(enabled)} is not allowed; allowed: True or False")
    changed = {name: value for name, value in chosen.items() if name != ENABLED}
    try:
        options = overridden(task.lock_options, changed)
    except InvalidLockOptions as error:
        raise _wrong(task, f"dlock: {error}") from None
    if refused := task.call_permissions.refusal(task.lock_options, options, chosen):
        raise _wrong(task, f"dlock: {refused}")
    if "key" not in changed and "scope" not in changed:
        return Call(options, task.lock_spec, enabled)
    return Call(options, _spec(task, options, changed), enabled)


def _refuse_unknown(task: Called, chosen: Mapping[Any, Any]) -> None:
    known = LockOptions.names()
    for name in chosen:
        if name != ENABLED and name not in known:
            meant = LockOptions.meant(name)
            raise _wrong(task, f"dlock: unknown option {written(name)}{meant}; known are {ENABLED}, {', '.join(known)}")


def _spec(task: Called, options: LockOptions, changed: Mapping[str, Any]) -> KeySpec:
    if callable(options.key) and "key" in changed:
        raise _wrong(task, "dlock: key=<a callable> cannot be carried by a message; allowed: a template or names")
    try:
        carried = options.key != task.lock_options.key
        return KeySpec(task.name, inspect.signature(task.run), options.key, options.scope, carried=carried)
    except InvalidLockOptions as error:
        raise _wrong(task, f"dlock: {str(error).removeprefix(_whose(task))}") from None


def _survives(value: Any) -> bool:
    """Is it the same behind its message? A dict's whole numbers as keys, for one, would become text."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _wrong(task: Called, text: str) -> InvalidLockOptions:
    return InvalidLockOptions(f"{_whose(task)}{text}")


def _whose(task: Called) -> str:
    return f"task {task.name!r}: "
