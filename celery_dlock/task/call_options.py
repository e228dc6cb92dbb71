"""The options of one call, ``apply_async(args, dlock={...})``, which its message carries to the worker."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..config.settings import permissions_of
from ..errors import InvalidLockOptions
from ..keys.key_spec import KeySpec
from ..keys.lock_name import LockName
from ..messaging.message_checks import MALFORMED
from ..options.error_texts import ALL_OPTIONS
from ..options.lock_options import LockOptions
from ..options.other_libraries import UNMISTAKABLE, equivalent
from ..options.overrides import overridden
from ..options.permissions import ENABLED
from ..utils.text import did_you_mean, written
from .definition_checks import check_features

if TYPE_CHECKING:
    from .base import SingletonTask

__all__ = [
    "ARGUMENT",
    "OPTIONS_HEADER",
    "Call",
    "call_of",
    "headers_for",
    "options_of",
    "reject_argument_of_body",
    "reject_misplaced_options",
]

#: The argument of ``apply_async`` and ``apply``, and the option of a signature.
ARGUMENT: Final = "dlock"
#: The message header of the options. Celery copies it into the task's own retries, which are the same call.
OPTIONS_HEADER: Final = "dlock_call"
_OPTIONS: Final = frozenset(LockOptions.names())
#: The options that decide which name a call has, and how many calls may hold it.
_NAMING: Final = {"key", "scope", "limit"}
_FOREIGN: Final = frozenset(UNMISTAKABLE)


class Call(NamedTuple):
    """The options of one call.

    Args:
        options: The task's options, overridden by the call's.
        spec: How the call's lock name is made.
        enabled: The call takes a lock.
    """

    options: LockOptions
    spec: KeySpec
    enabled: bool = True

    def name_of(self, args: Any, kwargs: Any) -> LockName:
        return self.spec.name_of(args, kwargs)


def call_of(task: SingletonTask, headers: Mapping[str, Any] | None, *, enabled: bool | None = None) -> Call:
    """Return the options of a call from the headers of its message.

    Args:
        task: The task that is called.
        headers: The headers of the message.
        enabled: Whether the app takes locks, if the caller knows it (``dlock_enabled``).

    Raises:
        InvalidLockOptions: The header is malformed, or holds options that this worker's task does not allow.
    """
    header = headers.get(OPTIONS_HEADER) if headers else None
    if not (task.dlock.enabled if enabled is None else enabled):
        return Call(task.lock_options, task.lock_spec, enabled=False)
    if header is None:
        return task.own_call
    named_task, chosen = _read(header)
    if chosen is None:
        raise InvalidLockOptions(
            f"task {task.name!r}: invalid header {OPTIONS_HEADER!r}: expected one that apply_async(dlock={{...}}) made"
        )
    if named_task != task.name:
        return task.own_call  # a body has passed the headers of another task on
    try:
        return _call_from(task, chosen)
    except InvalidLockOptions:
        raise
    except MALFORMED as error:  # a value of a type that no check expects
        raise _invalid(task, f"invalid header {OPTIONS_HEADER!r}: malformed ({type(error).__name__})") from error


def options_of(task: SingletonTask, headers: Mapping[str, Any] | None) -> LockOptions | None:
    """Return the options of a call that is about to be published.

    Returns:
        None if the call takes no lock, or if its options are invalid: the worker will fail it.
    """
    if OPTIONS_HEADER not in (headers or ()):
        return task.lock_options
    try:
        call = call_of(task, headers)
    except InvalidLockOptions:
        return None
    return call.options if call.enabled else None


def _read(header: Any) -> tuple[Any, Mapping[Any, Any] | None]:
    """Return the header's task name and options; None for both if the header is malformed."""
    try:
        named_task, chosen = header["task"], json.loads(header["options"])
    except (TypeError, ValueError, LookupError, RecursionError):
        return None, None
    return named_task, chosen if isinstance(chosen, Mapping) else None


def reject_misplaced_options(task: SingletonTask, given: Mapping[str, Any]) -> None:
    """Reject lock options that are given beside ``dlock=``: Celery takes any keyword and would ignore them.

    Args:
        task: The task that is called.
        given: The keywords given to ``apply_async``. A stamped header may have any name.

    Raises:
        InvalidLockOptions: A keyword is a lock option of this library or of another one. Celery and kombu use none
            of these names.
    """
    for option in given.keys() & _FOREIGN:
        if option not in (given.get("stamped_headers") or ()):
            raise _invalid(task, f"unknown option {option!r}{equivalent(option)}")
    for option in given.keys() & _OPTIONS:
        if option not in (given.get("stamped_headers") or ()):
            value = given[option]
            raise _invalid(task, f"misplaced {option}={value!r}: expected {ARGUMENT}={{{option!r}: {value!r}}}")


def reject_argument_of_body(task: SingletonTask, arguments: Any) -> None:
    """Reject ``dlock`` among the arguments of the body: ``delay()`` and ``s()`` pass every keyword on to the body.

    Args:
        task: The task that is called.
        arguments: The keyword arguments of the body.

    Raises:
        InvalidLockOptions: The body has no argument of that name.
    """
    if not arguments or ARGUMENT not in arguments:
        return
    parameters = inspect.signature(task.run).parameters
    if ARGUMENT not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        raise _invalid(
            task,
            f"misplaced argument {ARGUMENT!r}: delay() and s() pass it to the task's function, which has no such "
            f"argument; expected apply_async(args, kwargs, {ARGUMENT}={{...}}) or s(...).set({ARGUMENT}={{...}})",
        )


def headers_for(task: SingletonTask, chosen: Any, headers: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the headers of a message that carries a call's options.

    Args:
        task: The task that is called.
        chosen: The value of ``dlock=``; None if the call chooses no options.
        headers: The message's other headers.

    Raises:
        InvalidLockOptions: An option is unknown, not permitted, has an invalid value, or does not survive JSON.
    """
    if chosen is None:
        return headers
    if not isinstance(chosen, Mapping):
        raise _invalid(task, f"invalid dlock={chosen!r}: expected a dict of options")
    call = _call_from(task, chosen)
    carried = {name: call.enabled if name == ENABLED else _as_json(getattr(call.options, name)) for name in chosen}
    for name, value in carried.items():
        if not _survives(value):
            raise _invalid(task, f"dlock: invalid {name}={value!r}: expected a value that JSON can hold")
    # As text, because broker headers hold less than JSON does (AMQP: no long keys, no large numbers).
    return {**(headers or {}), OPTIONS_HEADER: {"task": task.name, "options": json.dumps(carried)}}


def _call_from(task: SingletonTask, chosen: Mapping[Any, Any]) -> Call:
    _reject_unknown(task, chosen)
    enabled = chosen.get(ENABLED, True)
    if not isinstance(enabled, bool):
        raise _invalid(task, f"dlock: invalid {ENABLED}={written(enabled)}: expected True or False")
    changed = {name: value for name, value in chosen.items() if name != ENABLED}
    try:
        options = overridden(task.lock_options, changed)
    except InvalidLockOptions as error:
        raise _invalid(task, f"dlock: {error}") from None
    if refused := permissions_of(task.app).refusal(task.lock_options, options, chosen):
        raise _invalid(task, f"dlock: {refused}")
    if enabled:
        # Also in the worker: the publisher's app may have another store.
        check_features(task.app.conf.get("dlock_url"), options, task.name)
    if not _NAMING & changed.keys():
        return Call(options, task.lock_spec, enabled)
    return Call(options, _key_spec(task, options, changed), enabled)


def _reject_unknown(task: SingletonTask, chosen: Mapping[Any, Any]) -> None:
    known = LockOptions.names()
    for name in chosen:
        if name != ENABLED and name not in known:
            meant = equivalent(name) or did_you_mean(name, (ENABLED, *known))
            raise _invalid(task, f"dlock: unknown option {written(name)}{meant}; {ALL_OPTIONS}")


def _key_spec(task: SingletonTask, options: LockOptions, changed: Mapping[str, Any]) -> KeySpec:
    if callable(options.key) and "key" in changed:
        raise _invalid(task, "dlock: invalid key=<a callable>: expected a template or argument names")
    try:
        carried = options.key != task.lock_options.key
        signature = inspect.signature(task.run)
        return KeySpec(task.name, signature, options.key, options.scope, carried=carried, seats=options.limit)
    except InvalidLockOptions as error:
        raise _invalid(task, f"dlock: {str(error).removeprefix(_prefix(task))}") from None


def _survives(value: Any) -> bool:
    """Return whether a value is the same after JSON. Integer keys of a dict, for example, become text."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _invalid(task: SingletonTask, text: str) -> InvalidLockOptions:
    return InvalidLockOptions(f"{_prefix(task)}{text}")


def _prefix(task: SingletonTask) -> str:
    return f"task {task.name!r}: "
