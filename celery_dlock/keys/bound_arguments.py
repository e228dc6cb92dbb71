"""The arguments of a call in the order of the signature, however the call was spelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import BoundArguments, Parameter, Signature
from typing import Any

from ..errors import LockKeyError

__all__ = ["ArgumentBinder"]

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class ArgumentBinder:
    """Binds calls to one task's signature, defaults applied.

    Args:
        task_name: For errors.
        signature: The task's, without ``self``.
    """

    __slots__ = ("_by_position", "_defaults", "_only_positions", "_plain", "_signature", "_task", "names")

    def __init__(self, task_name: str, signature: Signature) -> None:
        parameters = signature.parameters.values()
        self._task = task_name
        self._signature = signature
        #: The arguments' names, in the order of :meth:`values`.
        self.names = tuple(signature.parameters)
        self._plain = all(parameter.kind in _NAMED for parameter in parameters)
        self._by_position = sum(parameter.kind is Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        #: The number of arguments if each of them may be given by position and by name; else -1.
        self._only_positions = self._by_position if self._by_position == len(self.names) else -1
        self._defaults = {p.name: p.default for p in parameters if p.default is not Parameter.empty}

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments' values; ``LockKeyError`` where a call does not fit the signature."""
        if len(args) == self._only_positions and not kwargs:
            return args
        values = self._quick(args, kwargs) if self._plain else None
        return self._slow(args, kwargs) if values is None else values

    def bound(self, values: Sequence[Any]) -> BoundArguments:
        """Return the values of :meth:`values` as the arguments of a call."""
        return BoundArguments(self._signature, dict(zip(self.names, values, strict=True)))

    def example(self) -> BoundArguments:
        """A call of this signature: its shape, not its values."""
        empty: dict[object, Any] = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}
        return self.bound([empty.get(parameter.kind) for parameter in self._signature.parameters.values()])

    def _quick(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        # Signature.bind with apply_defaults takes several times as long as all the rest of a lock name.
        given = len(args)
        if given > self._by_position:
            return None
        values, unused = [*args], len(kwargs)
        for name in self.names[given:]:
            if name in kwargs:
                values.append(kwargs[name])
                unused -= 1
            elif name in self._defaults:
                values.append(self._defaults[name])
            else:
                return None
        return None if unused else values

    def _slow(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:  # it names arguments and shows no value
            raise self._unfit(str(error)) from None
        bound.apply_defaults()
        # Python 3.13.0 binds a call without a positional-only argument if **kwargs has one of its name.
        for name in self.names:
            if name not in bound.arguments:
                raise self._unfit(f"missing a required argument: {name!r}")
        return list(bound.arguments.values())

    def _unfit(self, reason: str) -> LockKeyError:
        return LockKeyError(f"task {self._task!r}: the call does not fit its signature: {reason}")
