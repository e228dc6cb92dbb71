"""The setting ``dlock_enabled``, which turns all locks of an app on or off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..utils.log import logger
from .settings_table import SETTINGS

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Switch"]

_NAME = "dlock_enabled"
_SETTING = SETTINGS[_NAME]


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
        # Look up only values that were assigned since the last complete look-up, which costs 20 to 40 us.
        value = conf.maps[0].get(_NAME, self._loaded)
        return value is True or self._checked(value)

    def _checked(self, value: Any) -> bool:
        """Return the setting from a value that is not True: None before the first complete look-up."""
        if value is None:
            value = self._loaded = self._app.conf.get(_NAME, _SETTING.default)
        enabled = bool(_SETTING.value(_NAME, value))
        if not enabled and not self._warned:
            self._warned = True
            logger.warning("dlock_enabled is False: tasks run and are published without locks")
        return enabled
