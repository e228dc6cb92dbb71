"""The broker check at a worker's start: whether its user may republish messages (RabbitMQ)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..messaging.publishing import confirms, refused_right
from ..utils.background import Loop, begin_thread
from ..utils.fork_guard import no_fork
from ..utils.log import logger

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["BrokerCheck"]

#: Seconds until a broker that did not answer is asked again.
AGAIN: Final = 2.0


class BrokerCheck:
    """Asks RabbitMQ, in its own thread, whether the worker's user may write to the default exchange.

    Messages are republished through that exchange, because it leads to one queue alone. A user may have the right to
    consume, and to publish through every other exchange, without this right.

    Args:
        app: The app whose broker to ask.
        goes_on: Called before each attempt; false ends the thread.
    """

    def __init__(self, app: Celery, goes_on: Callable[[], bool]) -> None:
        self._connection = app.connection_for_write()
        # Asked here, because it imports the transport: if this process forks while a thread imports, the import is
        # never finished in the child.
        self._can_tell = confirms(self._connection)
        self.loop = Loop("broker check", self._run_round, goes_on=goes_on, begin=begin_thread("broker-check"))

    def start(self) -> None:
        if self._can_tell:
            self.loop.start()

    def _run_round(self) -> float | None:
        return None if self._asked() else AGAIN

    def _asked(self) -> bool:
        """Ask once; return False if the broker did not answer. Celery itself reports that."""
        try:
            with no_fork():
                refused = refused_right(self._connection)
        except Exception as error:  # noqa: BLE001  # the transport's own errors
            logger.debug("cannot tell yet whether messages can be republished, retrying every %g s: %r", AGAIN, error)
            return False
        if refused:
            logger.error(
                "messages cannot be republished: the broker's user may not write to the default exchange. Calls that "
                "have to be republished fail, or are requeued at the broker. Action required: grant the user the right "
                "to write to 'amq.default' (docs/how-to/set-up-the-broker.md): %s",
                refused,
            )
        self._connection.release()
        return True
