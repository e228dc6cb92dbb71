"""The setting ``dlock_enabled``, which turns all locks of an app on or off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..options.validation import invalid_value
from ..utils.log import logger

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Switch"]

_SETTING = "dlock_enabled"


class Switch:
    """The setting ``dlock_enabled`` of one app.

    Args:
        app: The app.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._loaded: Any = None
        self._warned = False

    @property
    def on(self) -> bool:
        """Whether calls take locks. Tests may change the setting at any time.

        Raises:
            InvalidLockOptions: The setting is neither True nor False.
        """
        conf: Any = self._app.conf
        if self._loaded is None:
            self._loaded = conf.get(_SETTING, True)
        # Look up only values that were assigned since then: a complete look-up costs each task 20 to 40 us.
        value = conf.maps[0].get(_SETTING, self._loaded)
        if value is True:
            return True
        if value is not False:
            raise invalid_value(_SETTING, value, "True, or False to take no lock at all (for tests)")
        if not self._warned:
            self._warned = True
            logger.warning("dlock_enabled is False: tasks run and are published without locks")
        return False
