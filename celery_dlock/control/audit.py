"""The record of an operator's action: in the store, in the log, as a signal and as a monitor event."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from ..errors import StoreUnavailable
from ..store.operator_model import AuditRecord
from ..utils.log import log_fields, logger
from ..utils.text import printable

if TYPE_CHECKING:
    from celery import Celery

    from ..runtime import Runtime
    from ..store.operator import OperatorStore

__all__ = ["Audit", "current_user"]

#: Seconds for the connection to the broker, which carries the monitor event.
BROKER_TIMEOUT: Final = 2


def current_user() -> str:
    """Return the name of the user of this process; its number if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no entry in the password database
        return str(os.getuid())


class Audit:
    """The audit of one operator's actions.

    Args:
        app: The app whose broker carries the monitor events.
        runtime: Its runtime.
        store: The store of the records.
        user: The operator.
    """

    def __init__(self, app: Celery, runtime: Runtime, store: OperatorStore, user: str) -> None:
        self._app = app
        self._runtime = runtime
        self._store = store
        self.user = user
        self.host = socket.gethostname()

    def record(self, action: str, name: str, reason: str, detail: str) -> None:
        """Record an action that was done. If a part of this fails, that is logged, and the action stands."""
        # The log and the result of a dropped call show the reason: it must not bring line breaks or escapes there.
        reason = printable(" ".join(reason.split()))
        one = AuditRecord(action, name, self.user, self.host, time.time(), reason, detail)
        why = f" (reason: {reason})" if reason else ""
        text = f"{action}: {detail}{why}"
        logger.warning(
            "operator %s@%s on %s: %s", self.user, self.host, name, text, extra=log_fields(lock_name=name)
        )  # fmt: skip
        try:
            self._store.save_audit(one.at, json.dumps({**asdict(one), "id": uuid.uuid4().hex}))
        except StoreUnavailable as error:
            logger.warning("%s: the record of an operator's action was not stored: %s", name, error)
        owner = f"{self.user}@{self.host}"
        self._runtime.listeners.emit("operator", name=name, owner=owner, reason=text)
        if self._runtime.monitored_as() is None:  # outside of a worker, no listener sends the event
            self._send_event(name, owner, text)

    def _send_event(self, name: str, owner: str, text: str) -> None:
        try:
            with self._app.connection_for_write(connect_timeout=BROKER_TIMEOUT) as connection:
                connection.ensure_connection(max_retries=1, timeout=BROKER_TIMEOUT)
                with self._app.events.Dispatcher(connection, hostname=self.host) as dispatcher:
                    dispatcher.send("dlock-operator", name=name, owner=owner, reason=text)
        except Exception as error:  # noqa: BLE001  # kombu's transports raise errors of their own libraries
            logger.info("%s: the event of an operator's action was not sent: %r", name, error)

    def records(self, limit: int) -> list[AuditRecord]:
        """Return the newest records, the newest first."""
        found = [json.loads(text) for text in self._store.audit(limit)]
        return [AuditRecord(**{key: one[key] for key in AuditRecord.__slots__}) for one in reversed(found)]
