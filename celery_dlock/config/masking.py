"""``celery report`` and ``celery inspect conf`` show ``dlock_url`` without its secrets.

Celery masks the URLs that it knows itself, by name. It offers no place to add one, so the table of one app's settings
is wrapped here; the settings themselves stay as they are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from celery.signals import import_modules

from ..store.location import shown

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["mask_secrets"]

_MASK: Final = "********"
_SETTING: Final = "dlock_url"


def mask_secrets(app: Celery) -> None:
    """Mask the secrets of ``dlock_url`` wherever Celery shows the settings of ``app``. Again is harmless."""
    conf: Any = app.conf
    conf.maps  # noqa: B018  # an app that is not configured yet is configured by this
    # In the instance's own attributes: to set one in the usual way would make a setting of it.
    own = vars(conf)
    if "table" not in own:
        own["table"] = functools.partial(_table, type(conf).table, conf)


def _table(table: Any, conf: Any, with_defaults: bool = False, censored: bool = True) -> Any:  # noqa: FBT001, FBT002  # Celery's signature
    settings = table(conf, with_defaults, censored)
    if censored:
        for name, value in settings.items():
            # In any spelling: a namespace may stand before it, in upper case.
            if str(name).lower().endswith(_SETTING):
                settings[name] = _masked(value)
    return settings


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list | tuple):
        return [_masked(each) for each in value]
    return value if value is None else _MASK


@import_modules.connect
def _before_a_report(sender: Any, **_facts: Any) -> None:
    """``celery report`` imports the app's modules, and may make none of its tasks."""
    mask_secrets(sender)
