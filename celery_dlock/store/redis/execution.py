"""Execution of script commands on one connection, and the wait for their confirmations (``dlock_durability``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import NotConfirmed
from ...options.durability import PRIMARY, Durability, shortfall, wait_command
from .commands import Command
from .connection import ErrorReply, RespConnection
from .scripts import ScriptVariant
from .server_errors import error_from_reply

__all__ = ["ExistsPipeline", "ScriptPipeline", "execute", "execute_confirmed", "read_hash"]


def execute(connection: RespConnection, variant: ScriptVariant, texts: Sequence[str]) -> Any:
    """Run a script and return its reply.

    Args:
        connection: Connection to the server.
        variant: Script to run.
        texts: Its keys and arguments.
    """
    reply = connection.ask(variant.packed(texts))
    if type(reply) is ErrorReply and _script_missing(reply):
        return connection.ask(variant.packed(texts, whole=True))
    return reply


def execute_confirmed(
    connection: RespConnection, variant: ScriptVariant, texts: Sequence[str], durability: Durability
) -> Any:
    """Run a script, and wait for the confirmation of its writes. WAIT works only on the connection that wrote.

    Args:
        connection: Connection to the server.
        variant: Script to run.
        texts: Its keys and arguments.
        durability: Confirmation that its writes need.

    Returns:
        A pair: the reply, and the missing confirmation as an exception or None. An error reply is returned alone.
    """
    reply: Any = None
    for whole in (False, True):
        command = variant.packed(texts, whole=whole) + wait_command(durability, connection.timeout)
        reply, confirmed = connection.ask(command), connection.read()
        if type(reply) is not ErrorReply:
            return reply, _shortfall(durability, confirmed, connection.timeout)
        if not _script_missing(reply):
            break
    return reply


class ScriptPipeline:
    """Many commands in one write, and the wait for the confirmation of their writes behind them.

    If the writes are not confirmed, a :class:`~celery_dlock.errors.NotConfirmed` replaces the reply of each command
    that wrote.

    Args:
        durability: Confirmation that the writes need.
        wrote: Returns whether a reply means that the command wrote something.
    """

    def __init__(self, durability: Durability = PRIMARY, wrote: Callable[[Any], bool] = bool) -> None:
        self._durability = durability
        self._wrote = wrote

    def send(self, connection: RespConnection, calls: Sequence[Command]) -> None:
        commands = [variant.packed(texts) for variant, texts in calls]
        if self._durability != PRIMARY:
            commands.append(wait_command(self._durability, connection.timeout))
        connection.send(b"".join(commands))

    def read(self, connection: RespConnection, calls: Sequence[Command]) -> list[Any]:
        replies = connection.read_all(len(calls))
        confirmed = None if self._durability == PRIMARY else connection.read()
        missing = [index for index, reply in enumerate(replies) if _script_missing(reply)]
        for index in missing:
            variant, texts = calls[index]
            replies[index] = connection.ask(variant.packed(texts, whole=True))
        if self._durability == PRIMARY:
            return replies
        if missing:
            confirmed = connection.ask(wait_command(self._durability, connection.timeout))
        missed = _shortfall(self._durability, confirmed, connection.timeout)
        if missed is None:
            return replies
        return [missed if type(reply) is not ErrorReply and self._wrote(reply) else reply for reply in replies]


class ExistsPipeline:
    """Many EXISTS commands in one write."""

    def send(self, connection: RespConnection, calls: Sequence[tuple[str, tuple[str]]]) -> None:
        keys = [key.encode() for _, (key,) in calls]
        connection.send(b"".join([b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]))

    def read(self, connection: RespConnection, calls: Sequence[Any]) -> list[Any]:
        return [connection.read() for _ in calls]


def read_hash(connection: RespConnection, key: str) -> Any:
    """Return the fields and values of a hash as one list: field, value, field, value."""
    return connection.ask(b"*2\r\n$7\r\nHGETALL\r\n$%d\r\n%b\r\n" % (len(key.encode()), key.encode()))


def _script_missing(reply: Any) -> bool:
    """Return whether the server has lost the script, by a restart or by SCRIPT FLUSH."""
    return type(reply) is ErrorReply and reply.startswith("NOSCRIPT")


def _shortfall(durability: Durability, reply: Any, timeout: float) -> NotConfirmed | None:
    if type(reply) is ErrorReply:
        # The wait failed. The writes before it were executed.
        return NotConfirmed(str(error_from_reply(reply)))
    local, replicas = reply if durability.fsync else (1, reply)
    return shortfall(durability, local, replicas, timeout)
