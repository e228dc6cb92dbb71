"""Fixtures of the tests that have a `stage`: an environment with workers and their app."""

import pytest

from tests.conftest import WORKERS
from tests.support.rabbitmq import RabbitMQ


@pytest.fixture
def show_logs(stage, request):
    """Return the stage; show the logs of its workers if the test fails."""
    request.node.stash[WORKERS] = stage.workers
    return stage


@pytest.fixture
def tasks(show_logs):
    """Return the app module of the stage."""
    return show_logs.tasks


@pytest.fixture
def queue(stage):
    """Return the name of a queue that no worker consumes until the test says so."""
    return f"unread-{stage.fresh()}"


@pytest.fixture(scope="module")
def broker():
    """A RabbitMQ of this module."""
    with RabbitMQ() as running:
        yield running
