"""The pytest fixtures of celery-dlock. A module of its own: pytest imports it, and it imports nothing until used."""

import pytest


@pytest.fixture
def dlock_app(request):
    """Return the app of the fixture ``dlock``. Override it, unless the app is the current one or ``celery_app``."""
    if "celery_app" in request.fixturenames:
        return request.getfixturevalue("celery_app")
    from celery import current_app  # noqa: PLC0415  # not before it is used

    return current_app._get_current_object()  # noqa: SLF001  # the app, not its proxy


@pytest.fixture
def dlock_eager(request):
    """Return whether calls run at once. By default, unless the test has a worker of Celery's own fixtures."""
    return not {"celery_worker", "celery_session_worker"} & set(request.fixturenames)


@pytest.fixture
def dlock(dlock_app, dlock_eager):
    """Keep the locks of the app in memory, and play the other workers: a ``celery_dlock.testing.DLockKit``."""
    from celery_dlock.testing import DLockKit  # noqa: PLC0415  # not before it is used

    with DLockKit(dlock_app, eager=dlock_eager) as kit:
        yield kit
