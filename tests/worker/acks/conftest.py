import pytest

from tests.conftest import WORKERS


@pytest.fixture
def show(request):
    """Return a function that takes a stage and returns it; the logs of its workers are shown if the test fails."""

    def shown(made):
        request.node.stash[WORKERS] = made.workers
        return made

    return shown
