"""What a worker says of the broker at its start: may its user publish a message to a queue again?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..messaging.publishing import confirms, refused_right
from ..utils.fork_guard import no_fork
from ..utils.log import logger

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["BrokerInspection"]

#: Seconds until a broker that did not answer is asked again.
AGAIN: Final = 2.0


class BrokerInspection:
    """Asks RabbitMQ for the right to write to the default exchange, in a thread of its own.

    Messages are republished through that exchange, because it leads to one queue alone. A user may have the right to
    consume, and to publish through every other exchange, without this one.

    Args:
        app: Whose broker to ask.
        goes_on: Asked before each attempt; false ends the thread.
    """

    def __init__(self, app: Celery, goes_on: Callable[[], bool]) -> None:
        self._goes_on = goes_on
        self._connection = app.connection_for_write()
        # Asked here: it imports the transport. An import by a thread would be unfinished in a child forked meanwhile.
        self._can_tell = confirms(self._connection)

    def start(self) -> None:
        if self._can_tell:
            threading.Thread(target=self._run, name="dlock-broker-inspection", daemon=True).start()

    def _run(self) -> None:
        while self._goes_on() and not self._asked():
            time.sleep(AGAIN)

    def _asked(self) -> bool:
        """Ask once. A broker that is away is told of by Celery."""
        try:
            with no_fork():
                refused = refused_right(self._connection)
        except Exception as error:  # noqa: BLE001  # the transport's own
            logger.debug("cannot tell yet whether messages can be republished: %r", error)
            return False
        if refused:
            logger.error(
                "messages cannot be republished: the broker's user may not write to the default exchange. Calls that "
                "have to be republished fail, or go back to the broker. Grant the user the right to write to "
                "'amq.default' (docs/how-to/set-up-the-broker.md): %s",
                refused,
            )
        self._connection.release()
        return True
