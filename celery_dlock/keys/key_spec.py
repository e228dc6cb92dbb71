"""The lock name of a call, from the task's name, the arguments or the `key` option.

:mod:`.lock_name` adds the digest and the bucket. :mod:`..store.redis.keys` makes the Redis keys of a lock name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from inspect import Signature, iscoroutinefunction, signature
from typing import Any, Final, Literal

from ..errors import InvalidLockOptions, LockKeyError
from ..utils.clock import SystemClock
from ..utils.log import logger
from ..utils.text import cut, did_you_mean, written
from .bound_arguments import ArgumentBinder
from .canonical import form_of, text_form
from .lock_name import BUCKETS, LockName, escape, name_builder, not_text, shared_name
from .template import Template

__all__ = [
    "BUCKETS",
    "KeySpec",
    "LockName",
    "shared_name",
]

#: Seconds after which naming a call is reported as slow, once per task and process.
SLOW: Final = 0.010

_now: Final = SystemClock.monotonic
_slow_tasks: Final[set[str]] = set()  # reported already
_Values = Sequence[Any]
_SCOPES: Final = "'task', or 'shared' with a key"
_KEYS: Final = (
    "None, a template over argument names such as 'sms:{user_id}', a sequence of argument names, or a callable"
)


class KeySpec:
    """The compiled ``key`` of a task, which names its calls.

    Raises :class:`InvalidLockOptions` if the key does not fit the signature of the task.

    Args:
        task_name: The name of the task. It is part of each lock name of scope ``"task"``.
        signature: The signature of the task, without ``self``.
        key: None for all bound arguments, a template, argument names, or a callable.
        scope: With ``"shared"``, all tasks and ``Lock`` objects with an equal key share one lock.
        carried: The key comes from a message, so its template may use only arguments and their items.
        seats: How many calls may hold a name at once (``limit``).
    """

    __slots__ = ("_binding", "_name", "_shared", "_task")

    def __init__(
        self,
        task_name: str,
        signature: Signature,
        key: str | Sequence[str] | Callable[..., str] | None,
        scope: Literal["task", "shared"],
        *,
        carried: bool = False,
        seats: int = 1,
    ) -> None:
        self._task = task_name
        self._binding = ArgumentBinder(task_name, signature)
        if scope not in ("task", "shared"):  # a tuple, so that an unhashable value is refused, too
            raise self._invalid("scope", scope, "unknown scope", _SCOPES)
        self._shared = scope == "shared"
        if self._shared and key is None:
            why = "without a key there is no name that another task or a Lock could share"
            raise self._invalid("scope", scope, why, _SCOPES)
        self._name = self._compiled(key, carried=carried)
        if seats > 1:
            self._name = _with_seats(self._name, seats)

    def name_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LockName:
        """Return the lock name of a call. Every spelling of the call has the same name.

        Raises:
            LockKeyError: The arguments do not fit the signature, a value has no stable form, or the key callable fails.
                The call must not run, because it cannot be locked. The message shows no argument.
        """
        started = _now()
        values = self._binding.values(args, kwargs)
        name = self._name(values)
        if _now() - started > SLOW and self._task not in _slow_tasks:
            self._check_slow(values)
        return name

    def _check_slow(self, values: _Values) -> None:
        # Measure once more: the operating system may have suspended this process the first time.
        started = _now()
        self._name(values)
        seconds = _now() - started
        if seconds > SLOW:
            _slow_tasks.add(self._task)
            logger.warning(
                "Task %s: computing the lock name took %.0f ms, in which the interpreter runs nothing else; "
                "set key= to the arguments that identify a call",
                self._task,
                seconds * 1000,
                extra={"task_name": self._task},
            )

    def _compiled(self, key: object, *, carried: bool) -> Callable[[_Values], LockName]:
        if key is None:
            return self._by_arguments(self._binding.names)
        if isinstance(key, str):
            return self._by_text(self._checked_template(key, carried=carried).fill, "template", key)
        if isinstance(key, Sequence) and not isinstance(key, bytes | bytearray | memoryview):
            return self._by_arguments(self._checked_names(key))
        if callable(key) and not iscoroutinefunction(key):
            self._check_callable(key)
            return self._by_text(self._caller(key), "callable")
        raise self._invalid("key", key, f"{type(key).__name__} cannot be a key", _KEYS)

    def _checked_template(self, source: str, *, carried: bool) -> Template:
        try:
            return Template(source, self._binding.names, self._task, carried=carried)
        except ValueError as error:
            raise self._invalid("key", source, cut(str(error)), self._expected_names()) from None

    def _checked_names(self, key: Sequence[Any]) -> Sequence[str]:
        if not key:
            raise self._invalid("key", key, "it names no argument", _KEYS)
        for name in key:
            if not isinstance(name, str) or name not in self._binding.names:
                meant = did_you_mean(name, self._binding.names)
                raise self._invalid("key", key, f"{name!r} names no argument{meant}", self._expected_names())
        return key

    def _by_arguments(self, names: Sequence[str]) -> Callable[[_Values], LockName]:
        chosen = sorted(set(names))  # sorted: the order of the names must not change the lock name
        indexes = [self._binding.names.index(name) for name in chosen]
        in_order = indexes == list(range(len(indexes)))
        labels = [f"task {self._task!r}: argument {name!r}" for name in chosen]
        parts = ("shared",) if self._shared else ("task", self._task)
        shown = escape(",".join(chosen) if self._shared else self._task)
        make = name_builder(*parts, "arguments", *chosen)

        def name_of(values: _Values) -> LockName:
            picked = values if in_order else [values[index] for index in indexes]
            return make(shown, b"".join(map(form_of, picked, labels)))

        return name_of

    def _by_text(self, fill: Callable[[_Values], tuple[str, bytes]], *kind: str) -> Callable[[_Values], LockName]:
        task = escape(self._task)
        make = name_builder("task", self._task, *kind)

        def name_of(values: _Values) -> LockName:
            text, forms = fill(values)
            return make(f"{task}:{escape(text)}", forms)

        def name_of_shared(values: _Values) -> LockName:
            text, _ = fill(values)
            if not text:
                raise LockKeyError(f"task {self._task!r}: its key is empty text for these arguments")
            return shared_name(text)

        return name_of_shared if self._shared else name_of

    def _caller(self, key: Callable[..., object]) -> Callable[[_Values], tuple[str, bytes]]:
        def call(values: _Values) -> tuple[str, bytes]:
            bound = self._binding.bound(values)
            try:
                text = key(*bound.args, **bound.kwargs)
            except Exception as error:  # noqa: BLE001 - the author's code; its message may show a value
                raise LockKeyError(
                    f"task {self._task!r}: the key callable raised {type(error).__name__} at {_line(error)}"
                ) from None
            if isinstance(text, str) and text:
                return text, text_form(text)
            raise LockKeyError(f"task {self._task!r}: the key callable returned {not_text(text)}, not a non-empty str")

        return call

    def _check_callable(self, key: Callable[..., Any]) -> None:
        try:
            takes = signature(key)
        except (TypeError, ValueError):
            return  # a builtin without a signature: the first call raises if it does not fit
        call = self._binding.example()
        try:
            takes.bind(*call.args, **call.kwargs)
        except TypeError as error:
            raise self._invalid(
                "key", key, f"it does not take the task's arguments: {error}", self._expected_names()
            ) from None

    def _expected_names(self) -> str:
        names = self._binding.names
        return (
            f"only the argument names {', '.join(map(repr, names))}"
            if names
            else "no argument names: the task has none"
        )

    def _invalid(self, option: str, value: object, reason: str, expected: str) -> InvalidLockOptions:
        return InvalidLockOptions(
            f"task {self._task!r}: invalid {option}={written(value)}: {reason}; expected {expected}"
        )


def _with_seats(name_of: Callable[[_Values], LockName], seats: int) -> Callable[[_Values], LockName]:
    return lambda values: name_of(values)._replace(seats=seats)


def _line(error: BaseException) -> str:
    """Return the line at which the key callable failed. The error message may quote an argument, so it is left out."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f"{frame.filename}:{frame.lineno}"
