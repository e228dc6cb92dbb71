import pytest


@pytest.fixture
def tasks(stage, tasks):
    """Return the app module of the stage; after the test, open the gate of every body."""
    yield tasks
    stage.let_all_go()
