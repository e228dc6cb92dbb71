from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_dlock.stores.redis import RedisStore

MakeApp = Callable[..., Celery]


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    made = RedisStore(redis_url, timeout=5)
    yield made
    made.close()


@pytest.fixture
def make_app(redis_url: str) -> MakeApp:
    def make(url: str = redis_url, **conf: Any) -> Celery:
        app = Celery("plain", broker="memory://", set_as_current=False)
        app.conf.update(dlock_url=url, **conf)
        return app

    return make


@pytest.fixture
def app(make_app: MakeApp) -> Celery:
    return make_app()
