"""The shop's app for tests: no broker, no result backend and no lock store but the memory of this process."""

import pytest
from celery import Celery

from example_project.shop import tasks  # noqa: F401  # registers the tasks
from example_project.shop.app import app


@pytest.fixture(scope="session")
def dlock_app() -> Celery:
    """Return the app that the fixture ``dlock`` gives locks in memory."""
    app.conf.update(broker_url="memory://", result_backend="cache+memory://")
    return app
