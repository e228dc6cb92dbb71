"""Settings of an app that is made for one test."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_dlock.config.settings import Settings


def settings_of(broker: str | list[str] = "amqp://b//", backend: str | None = None, **conf: Any) -> Settings:
    app = Celery("a", broker=broker, backend=backend, set_as_current=False)  # type: ignore[arg-type]  # lists are allowed
    app.conf.update(conf)
    return Settings.of(app)
