"""A Django project in this process, whose current Celery app has its locks on the shared server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, _state

from celery_dlock.config.locations import locations_from_settings
from celery_dlock.control import LockControl
from celery_dlock.store.factory import open_store
from celery_dlock.store.redis.store import RedisStore
from tests.support.servers import LOCK_USER, OPERATOR_USER


@pytest.fixture(scope="session", autouse=True)
def project() -> None:
    from tests.support import django_project  # noqa: PLC0415  # the other lanes import this file, and have no Django

    django_project.set_up()


@pytest.fixture
def app(lock_url: str, monkeypatch: pytest.MonkeyPatch) -> Celery:
    made = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.conf.dlock_url = lock_url.replace(f"{LOCK_USER}:", f"{OPERATOR_USER}:")
    monkeypatch.setattr(_state._tls, "current_app", made)  # type: ignore[attr-defined]  # not in the stubs
    return made


@pytest.fixture
def control(app: Celery) -> Iterator[LockControl]:
    with LockControl(app) as made:
        yield made


@pytest.fixture
def store(lock_url: str) -> Iterator[RedisStore]:
    made = open_store(locations_from_settings(lock_url, {}), timeout=5, prefix="dlock")
    yield made  # type: ignore[misc]  # of one server
    made.close()


@pytest.fixture
def login(app: Celery) -> Iterator[Callable[..., Any]]:  # noqa: ARG001  # the app whose locks the admin shows
    """Return a client of Django whose user "alice" is a member of the staff with these permissions."""
    from django.contrib.auth.models import Permission, User  # noqa: PLC0415  # Django is configured now
    from django.test import Client  # noqa: PLC0415

    def login(*permissions: str, csrf: bool = False) -> Any:
        user = User.objects.create_user("alice", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions), "an unknown permission"
        client = Client(enforce_csrf_checks=csrf)
        client.force_login(user)
        return client

    yield login
    User.objects.all().delete()
