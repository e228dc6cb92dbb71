import pytest

from tests.conftest import WORKERS


@pytest.fixture
def show(request):
    """Return a function that returns the environment that it takes. If the test fails, its workers' logs are shown."""

    def shown(made):
        request.node.stash[WORKERS] = made.workers
        return made

    return shown
