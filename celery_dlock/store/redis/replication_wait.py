"""Scripts whose effects others than the primary have to confirm (``durability=``), in the same write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...errors import NotConfirmed
from ...options.durability import PRIMARY, Durability, shortfall, strongest, wait_command
from .connection import ErrorReply, RespConnection
from .scripts import Script
from .server_errors import error_from_reply

__all__ = ["PipelineWithWait", "execute_and_wait"]

_Call: TypeAlias = tuple[Sequence[str], Sequence[str], Durability]


def execute_and_wait(
    wire: RespConnection, script: Script, keys: Sequence[str], args: Sequence[str], durability: Durability
) -> ErrorReply | tuple[Any, NotConfirmed | None]:
    """The reply, and what its confirmation lacks. The server lets this connection alone wait for it."""
    patience = wire.timeout
    behind = wait_command(durability, patience)
    reply, count = wire.ask(script.packed(keys, args) + behind), wire.read()
    if _forgotten(reply):
        reply, count = wire.ask(script.packed(keys, args, whole=True) + behind), wire.read()
    return reply if type(reply) is ErrorReply else (reply, _short(durability, count, patience))


class PipelineWithWait:
    """One script many times, and behind all of them one wait for each kind of confirmation.

    An answer whose confirmation lacks something is the :class:`NotConfirmed` that says so.

    Args:
        script: Of each.
        wrote: Does this reply mean that there is something to be confirmed?
    """

    def __init__(self, script: Script, wrote: Callable[[Any], bool]) -> None:
        self._script = script
        self._wrote = wrote

    def send(self, wire: RespConnection, calls: Sequence[_Call]) -> None:
        said = [self._script.packed(keys, args) for keys, args, _ in calls]
        wire.send(b"".join(said + [wait_command(asked, wire.timeout) for asked in _asked(calls)]))

    def read(self, wire: RespConnection, calls: Sequence[_Call]) -> list[Any]:
        patience, asked = wire.timeout, _asked(calls)
        told = [wire.read() for _ in calls]
        counts = [wire.read() for _ in asked]
        forgotten = [place for place, reply in enumerate(told) if _forgotten(reply)]
        for place in forgotten:
            keys, args, _ = calls[place]
            told[place] = wire.ask(self._script.packed(keys, args, whole=True))
        if forgotten:
            counts = [wire.ask(wait_command(one, patience)) for one in asked]
        by_kind = {one.fsync: count for one, count in zip(asked, counts, strict=True)}
        for place, (_, _, durability) in enumerate(calls):
            if durability != PRIMARY and type(told[place]) is not ErrorReply and self._wrote(told[place]):
                told[place] = _short(durability, by_kind[durability.fsync], patience) or told[place]
        return told


def _asked(calls: Sequence[_Call]) -> list[Durability]:
    return strongest(durability for _, _, durability in calls)


def _forgotten(reply: Any) -> bool:
    return type(reply) is ErrorReply and reply.startswith("NOSCRIPT")


def _short(durability: Durability, reply: Any, patience: float) -> NotConfirmed | None:
    if type(reply) is ErrorReply:
        # Whatever was written before it stands.
        return NotConfirmed(str(error_from_reply(reply)))
    local, replicas = reply if durability.fsync else (1, reply)
    return shortfall(durability, local, replicas, patience)
