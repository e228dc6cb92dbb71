"""Execution of script commands on one connection, with the wait for their confirmations (``durability=``), if any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...errors import NotConfirmed
from ...options.durability import PRIMARY, Durability, shortfall, strongest, wait_command
from .connection import ErrorReply, RespConnection
from .scripts import ScriptVariant
from .server_errors import error_from_reply

__all__ = ["Call", "ScriptPipeline", "execute"]

#: A command, and who has to confirm what it wrote.
Call: TypeAlias = tuple[ScriptVariant, tuple[str, ...], Durability]


def execute(
    wire: RespConnection,
    variant: ScriptVariant,
    texts: Sequence[str],
    durability: Durability = PRIMARY,
    whole: bool = False,  # noqa: FBT001, FBT002 (a keyword costs more steps)
) -> Any:
    """Return the reply. With a durability, return the reply and what its confirmation lacks.

    An error reply is always returned alone. The server lets only this connection wait for the confirmation.

    Args:
        wire: Connection to the server.
        variant: Script to run.
        texts: Its keys and arguments.
        durability: Who has to confirm what it writes.
        whole: Send the script's text, which loads it, instead of its SHA-1.
    """
    command = variant.packed(texts, whole=whole)
    confirmed: Any = None
    if durability is PRIMARY:
        reply = wire.ask(command)
    else:
        reply, confirmed = wire.ask(command + wait_command(durability, wire.timeout)), wire.read()
    if type(reply) is ErrorReply:
        missing = _script_missing(reply) and not whole
        return execute(wire, variant, texts, durability, True) if missing else reply  # noqa: FBT003 (see above)
    return reply if durability is PRIMARY else (reply, _shortfall(durability, confirmed, wire.timeout))


class ScriptPipeline:
    """Many commands in one write, followed by one wait for each kind of confirmation that they need.

    If a confirmation lacks something, the answer is the :class:`~celery_dlock.errors.NotConfirmed` that says so.

    Args:
        wrote: Whether a reply means that there is something to confirm.
    """

    def __init__(self, wrote: Callable[[Any], bool] = bool) -> None:
        self._wrote = wrote

    def send(self, wire: RespConnection, calls: Sequence[Call]) -> None:
        commands = [variant.packed(texts) for variant, texts, _ in calls]
        wire.send(b"".join(commands + [wait_command(wait, wire.timeout) for wait in _waits(calls)]))

    def read(self, wire: RespConnection, calls: Sequence[Call]) -> list[Any]:
        waits = _waits(calls)
        replies = [wire.read() for _ in calls]
        counts = [wire.read() for _ in waits]
        missing = [place for place, reply in enumerate(replies) if _script_missing(reply)]
        for place in missing:
            variant, texts, _ = calls[place]
            replies[place] = wire.ask(variant.packed(texts, whole=True))
        if missing:
            counts = [wire.ask(wait_command(wait, wire.timeout)) for wait in waits]
        by_kind = {wait.fsync: count for wait, count in zip(waits, counts, strict=True)}
        if not by_kind:
            return replies
        for place, (_, _, durability) in enumerate(calls):
            reply = replies[place]
            if durability != PRIMARY and type(reply) is not ErrorReply and self._wrote(reply):
                replies[place] = _shortfall(durability, by_kind[durability.fsync], wire.timeout) or reply
        return replies


def _waits(calls: Sequence[Call]) -> list[Durability]:
    return strongest(durability for _, _, durability in calls)


def _script_missing(reply: Any) -> bool:
    """Return whether the server was restarted, or its scripts were flushed. The whole text loads the script again."""
    return type(reply) is ErrorReply and reply.startswith("NOSCRIPT")


def _shortfall(durability: Durability, reply: Any, timeout: float) -> NotConfirmed | None:
    if type(reply) is ErrorReply:
        # What was written before the wait stands.
        return NotConfirmed(str(error_from_reply(reply)))
    local, replicas = reply if durability.fsync else (1, reply)
    return shortfall(durability, local, replicas, timeout)
