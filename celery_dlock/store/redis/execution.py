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

#: A command, and the confirmation that its writes need.
Call: TypeAlias = tuple[ScriptVariant, tuple[str, ...], Durability]


def execute(
    connection: RespConnection,
    variant: ScriptVariant,
    texts: Sequence[str],
    durability: Durability = PRIMARY,
    whole: bool = False,  # noqa: FBT001, FBT002 (a keyword argument is slower)
) -> Any:
    """Run a script and return its reply. With a durability, return a pair: the reply and the missing confirmation.

    An error reply is always returned alone. Only this connection can wait for the confirmation of its own writes.

    Args:
        connection: Connection to the server.
        variant: Script to run.
        texts: Its keys and arguments.
        durability: Confirmation that its writes need.
        whole: Send the script's text, which loads it, instead of its SHA-1.
    """
    command = variant.packed(texts, whole=whole)
    confirmed: Any = None
    if durability is PRIMARY:
        reply = connection.ask(command)
    else:
        reply, confirmed = connection.ask(command + wait_command(durability, connection.timeout)), connection.read()
    if type(reply) is ErrorReply:
        missing = _script_missing(reply) and not whole
        return execute(connection, variant, texts, durability, True) if missing else reply  # noqa: FBT003 (see above)
    return reply if durability is PRIMARY else (reply, _shortfall(durability, confirmed, connection.timeout))


class ScriptPipeline:
    """Many commands in one write, followed by one wait for each kind of confirmation that they need.

    If a command is not confirmed, a :class:`~celery_dlock.errors.NotConfirmed` replaces its reply.

    Args:
        wrote: Returns whether a reply means that the command wrote something.
    """

    def __init__(self, wrote: Callable[[Any], bool] = bool) -> None:
        self._wrote = wrote

    def send(self, connection: RespConnection, calls: Sequence[Call]) -> None:
        commands = [variant.packed(texts) for variant, texts, _ in calls]
        connection.send(b"".join(commands + [wait_command(wait, connection.timeout) for wait in _waits(calls)]))

    def read(self, connection: RespConnection, calls: Sequence[Call]) -> list[Any]:
        waits = _waits(calls)
        replies = [connection.read() for _ in calls]
        counts = [connection.read() for _ in waits]
        missing = [index for index, reply in enumerate(replies) if _script_missing(reply)]
        for index in missing:
            variant, texts, _ = calls[index]
            replies[index] = connection.ask(variant.packed(texts, whole=True))
        if missing:
            counts = [connection.ask(wait_command(wait, connection.timeout)) for wait in waits]
        by_kind = {wait.fsync: count for wait, count in zip(waits, counts, strict=True)}
        if not by_kind:
            return replies
        for index, (_, _, durability) in enumerate(calls):
            reply = replies[index]
            if durability != PRIMARY and type(reply) is not ErrorReply and self._wrote(reply):
                replies[index] = _shortfall(durability, by_kind[durability.fsync], connection.timeout) or reply
        return replies


def _waits(calls: Sequence[Call]) -> list[Durability]:
    return strongest(durability for _, _, durability in calls)


def _script_missing(reply: Any) -> bool:
    """Return whether the server does not have the script: it was restarted, or its scripts were flushed."""
    return type(reply) is ErrorReply and reply.startswith("NOSCRIPT")


def _shortfall(durability: Durability, reply: Any, timeout: float) -> NotConfirmed | None:
    if type(reply) is ErrorReply:
        # The wait failed. The writes before it were executed.
        return NotConfirmed(str(error_from_reply(reply)))
    local, replicas = reply if durability.fsync else (1, reply)
    return shortfall(durability, local, replicas, timeout)
