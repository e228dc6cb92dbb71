"""A decorated task builds on the task class of its app, as a task of Celery's own decorators does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, _state

from celery_dlock import LockOptions, SingletonTask, singleton_task
from tests.support.processes import ROOT

pytestmark = pytest.mark.core

CALLS: list[str] = []


class AppTask(Task):  # type: ignore[type-arg]  # Celery's class takes no arguments at run time
    max_retries = 77

    def delay_on_commit(self) -> str:
        return f"delayed {self.name}"

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        CALLS.append("before_start")

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        CALLS.append("after_return")


class AppSingleton(SingletonTask):
    lock_options = LockOptions(on_conflict="raise", ttl=9)


def made(task_cls: Any) -> Celery:
    return Celery("app", broker="memory://", backend="cache+memory://", task_cls=task_cls, set_as_current=False)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    app = made(AppTask)
    monkeypatch.setattr(_state._tls, "current_app", app)  # type: ignore[attr-defined]  # not in the stubs
    return app


def test_task_with_app_has_methods_of_the_apps_task_class() -> None:
    @singleton_task(app=made(AppTask), name="with_app")
    def with_app() -> None: ...

    assert isinstance(with_app, SingletonTask)
    assert isinstance(with_app, AppTask)
    assert with_app.delay_on_commit() == "delayed with_app"
    assert with_app.max_retries == 77


@pytest.mark.usefixtures("current")
def test_shared_task_has_methods_of_each_apps_task_class() -> None:
    @singleton_task(name="shared")
    def shared() -> None: ...

    assert shared.delay_on_commit() == "delayed shared"
    plain = Celery("plain", broker="memory://", set_as_current=False)
    assert isinstance(plain.tasks["shared"], SingletonTask)
    assert not isinstance(plain.tasks["shared"], AppTask)


def test_task_with_base_keeps_it_before_the_apps_task_class() -> None:
    class Base(SingletonTask):
        max_retries = 5

    @singleton_task(app=made(AppTask), name="with_base", base=Base)
    def with_base() -> None: ...

    assert with_base.max_retries == 5
    assert with_base.delay_on_commit() == "delayed with_base"


def test_app_task_with_singleton_base_has_methods_of_the_apps_task_class() -> None:
    app = made(AppTask)

    @app.task(base=SingletonTask, name="by_celery")
    def by_celery() -> None: ...

    assert by_celery.delay_on_commit() == "delayed by_celery"


def test_hooks_of_the_apps_task_class_run_around_the_body() -> None:
    app = made(AppTask)
    app.conf.dlock_url = "redis://127.0.0.1:1"

    @singleton_task(app=app, name="hooked", on_store_error="run")
    def hooked() -> None:
        CALLS.append("body")

    CALLS.clear()
    hooked.apply().get()
    assert CALLS == ["before_start", "body", "after_return"]


def test_app_whose_task_class_is_a_singleton_gives_its_lock_options() -> None:
    app = made(AppSingleton)

    @singleton_task(app=app, name="inheriting")
    def inheriting() -> None: ...

    @singleton_task(app=app, name="changing", ttl=7)
    def changing() -> None: ...

    @app.task(name="by_celery")
    def by_celery() -> None: ...

    assert isinstance(inheriting, AppSingleton)
    assert (changing.lock_options.on_conflict, changing.lock_options.ttl) == ("raise", 7)
    assert inheriting.lock_options == by_celery.lock_options == AppSingleton.lock_options


DJANGO = """
import django
from celery import Celery
from django.conf import settings

settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
django.setup()
from celery_dlock import singleton_task
from django.db import transaction

app = Celery("project", broker="memory://", backend="cache+memory://")

@singleton_task(app=app)
def with_app(): ...

@singleton_task
def shared(): ...

def messages():
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        channel.queue_declare("celery")
        return channel.queue_purge("celery") or 0

for task in (with_app, shared):
    with transaction.atomic():
        task.delay_on_commit()
        task.apply_async_on_commit(countdown=1)
        print(messages())
    print(messages())
"""


def test_tasks_of_a_django_project_are_published_on_commit() -> None:
    pytest.importorskip("django")
    environ = {**os.environ, "DJANGO_SETTINGS_MODULE": "given_by_settings_configure"}
    run = subprocess.run(
        [sys.executable, "-c", DJANGO], capture_output=True, text=True, timeout=60, cwd=ROOT, env=environ, check=False
    )
    assert run.stdout.split() == ["0", "2", "0", "2"], run.stderr
