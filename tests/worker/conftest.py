"""Fixtures of the tests with workers and their app."""

import pytest

from tests.conftest import WORKERS
from tests.support.rabbitmq import RabbitMQ


@pytest.fixture
def show_logs(environment, request):
    """Return the environment; show the logs of its workers if the test fails."""
    request.node.stash[WORKERS] = environment.workers
    return environment


@pytest.fixture
def tasks(show_logs):
    """Return the app module of the environment."""
    return show_logs.tasks


@pytest.fixture
def queue(environment):
    """Return the name of a queue that no worker consumes until the test says so."""
    return f"unread-{environment.fresh()}"


@pytest.fixture(scope="module")
def broker():
    """A RabbitMQ of this module."""
    with RabbitMQ() as running:
        yield running
