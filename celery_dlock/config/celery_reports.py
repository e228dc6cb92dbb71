"""Masks the secrets of ``dlock_url`` in ``celery report`` and ``celery inspect conf``.

Celery masks URLs by the names of their settings, and has no hook for further names. So this module wraps the method
that lists one app's settings. The settings themselves do not change.
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
    """Mask the secrets of ``dlock_url`` wherever Celery shows the settings of ``app``. A second call is harmless."""
    conf: Any = app.conf
    conf.maps  # noqa: B018  # configures an app that is not configured yet
    # Write to the instance's attributes directly: setattr on a Settings object would add a setting.
    own = vars(conf)
    if "table" not in own:
        own["table"] = functools.partial(_table, type(conf).table, conf)


def _table(table: Any, conf: Any, with_defaults: bool = False, censored: bool = True) -> Any:  # noqa: FBT001, FBT002  # Celery's signature
    settings = table(conf, with_defaults, censored)
    if censored:
        for name, value in settings.items():
            # A namespace may precede the name, and then both are in upper case.
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
    """Mask the secrets for ``celery report``, which imports the app's modules and may create none of its tasks."""
    mask_secrets(sender)
