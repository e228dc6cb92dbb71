"""``celery report`` and ``celery inspect conf`` show no secret of ``dlock_url``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.worker.control import conf

from celery_dlock import singleton_task

pytestmark = pytest.mark.core

URLS: list[Any] = [
    "redis://user:s3cret@store:6380/2",
    "redis://store:6380/2?password=s3cret",
    ["redis://:s3cret@store:6380/2", "redis://:s3cret@b", "redis://:s3cret@c"],
    "sentinel://:s3cret@store:6380;sentinel://:s3cret@b:6380/0",
]


def an_app(**settings: Any) -> Celery:
    app = Celery("masking", broker="redis://:s3cret@broker", set_as_current=False)
    app.conf.update(settings)
    return app


@pytest.mark.parametrize("url", URLS)
def test_a_report_shows_the_place_of_dlock_url_and_no_secret(url: Any) -> None:
    app = an_app(dlock_url=url, dlock_transport_options={"sentinel_kwargs": {"password": "s3cret"}})

    @singleton_task(app=app, name="masking.body")
    def body() -> None: ...

    app.finalize()

    class State:
        pass

    state = State()
    state.app = app  # type: ignore[attr-defined]  # what the command asks for
    for text in (app.bugreport(), app.conf.humanize(), str(conf(state))):  # type: ignore[no-untyped-call]
        assert "dlock_url" in text
        assert "store:6380" in text
        assert "s3cret" not in text
    assert app.conf.dlock_url == url
    assert "s3cret" in app.conf.humanize(censored=False)


def test_celery_report_of_an_app_whose_tasks_nobody_has_asked_for(tmp_path: Path) -> None:
    (tmp_path / "reported.py").write_text(
        "from celery import Celery\n"
        "from celery_dlock import singleton_task\n"
        "class Settings:\n"
        "    CELERY_BROKER_URL = 'redis://broker'\n"
        "    CELERY_DLOCK_URL = 'redis://:s3cret@store:6380/2'\n"
        "app = Celery('reported')\n"
        "app.config_from_object(Settings, namespace='CELERY')\n"
        "@singleton_task(app=app)\n"
        "def body(): ...\n"
    )
    command = [sys.executable, "-m", "celery", "-A", "reported", "report"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])}
    told = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert "store:6380/2" in told.stdout
    assert "s3cret" not in told.stdout
