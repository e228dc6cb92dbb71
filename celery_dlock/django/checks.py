"""Django's system checks of the current Celery app: ``manage.py check`` shows what would stop or harm a worker.

Each check of the tasks first imports their modules, as a worker does. Only ``check --deploy`` connects to the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from celery.app import app_or_default
from django.core.checks import CheckMessage, Error, Warning, register  # noqa: A004  # Django's name

from ..config.settings import Settings
from ..errors import InvalidLockOptions, NoLockStore, StoreUnavailable
from ..runtime import Runtime
from ..store.server_model import StoreInfo, may_evict
from ..task.app_check import check_task, singleton_tasks, unlocked_tasks

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["check_settings", "check_store", "check_tasks"]

TAG = "celery_dlock"
_SKIP = "CELERY_SKIP_CHECKS"


@register(TAG)
def check_settings(**_options: Any) -> list[CheckMessage]:
    """Check the ``CELERY_DLOCK_`` settings: unknown names, invalid values, and whether they name a lock store."""
    app = app_or_default()
    try:
        if Runtime.of(app).enabled:
            Settings.of(app)
    except NoLockStore as error:
        return [Error(str(error), id=f"{TAG}.E002")]
    except InvalidLockOptions as error:
        return [Error(str(error), id=f"{TAG}.E001")]
    return []


@register(TAG)
def check_tasks(**_options: Any) -> list[CheckMessage]:
    """Check the key and the options of each singleton task, and report tasks whose lock options have no effect."""
    app = app_or_default()
    try:
        _import_tasks(app)
        found: list[CheckMessage] = [Warning(text, id=f"{TAG}.W001") for _, text in unlocked_tasks(app)]
    except InvalidLockOptions as error:  # of a decorator, or of a shared task that is bound to the app now
        return [Error(str(error), id=f"{TAG}.E003")]
    if check_settings() or not Runtime.of(app).enabled:
        return found
    for task in singleton_tasks(app):
        try:
            check_task(task)
        except InvalidLockOptions as error:
            found.append(Error(str(error), id=f"{TAG}.E003"))
    return found


@register(TAG, deploy=True)
def check_store(**_options: Any) -> list[CheckMessage]:
    """Check that the store keeps its data over a restart and deletes none of it when its memory is full."""
    runtime = Runtime.of(app_or_default())
    if check_settings() or not runtime.enabled:
        return []
    urls = ", ".join(location.shown for location in runtime.settings.locations)
    with closing(runtime.open_store(runtime.settings.timeout)) as store:
        try:
            return list(_store_warnings(urls, store.info()))
        except StoreUnavailable as error:
            return [Warning(f"lock store {urls} was not checked: {error}", id=f"{TAG}.W004")]


def _store_warnings(urls: str, info: StoreInfo) -> Iterator[CheckMessage]:
    if not info.durable:
        yield Warning(
            f"lock store {urls} loses its data when it restarts: held locks, waiting calls and used names",
            hint=f"{info.durability_cure.capitalize()}.",
            id=f"{TAG}.W002",
        )
    if may_evict(info.eviction):
        yield Warning(
            f"lock store {urls} may delete locks when its memory is full: its maxmemory-policy is {info.eviction}",
            hint="Set maxmemory-policy noeviction.",
            id=f"{TAG}.W003",
        )
    if info.unreachable:
        yield Warning(f"lock servers were not checked: {'; '.join(info.unreachable)}", id=f"{TAG}.W004")


def _import_tasks(app: Celery) -> None:
    """Import the task modules of the app, as a worker does. Python imports each of them only once."""
    # Celery's own switch: with it, importing the modules does not run Django's checks again.
    before = os.environ.get(_SKIP)
    os.environ[_SKIP] = "1"
    try:
        app.loader.import_default_modules()
    finally:
        del os.environ[_SKIP]
        os.environ.update({_SKIP: before} if before is not None else {})
