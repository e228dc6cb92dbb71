"""The log, also for threads that must not touch it."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import Any, cast

from . import native

__all__ = ["logger"]

_near = logging.getLogger("celery_dlock")


class _FromAfar(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 has no arguments for it
    """Has a greenlet write each record, in their order: a handler's lock is shared with greenlets."""

    def __init__(self) -> None:
        super().__init__(_near, {})
        self._errands: dict[int, native.Errands] = {}  # by process: a fork may come while one is done

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("exc_info"):
            kwargs["exc_info"] = sys.exc_info()
        errands = self._errands.get(os.getpid()) or self._errands.setdefault(os.getpid(), native.Errands())
        errands.add(partial(_near.log, level, msg, *args, **kwargs))


class _Voice:
    def __init__(self) -> None:
        self._from_afar = _FromAfar()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._from_afar if native.foreign() else _near, name)


#: What every room of ours logs with.
logger = cast("logging.Logger", _Voice())
