import pytest


@pytest.fixture
def tasks(environment, tasks):
    """Return the app module of the environment; after the test, open the gate of every body."""
    yield tasks
    environment.let_all_go()
