"""A finished run is gone at once, and with it the call's arguments, which may be secrets."""

import gc
import weakref

from celery import Celery

from celery_dlock import singleton_task


class Secret:
    """An argument that can be watched."""


def test_a_finished_run_keeps_no_argument_alive(redis_url: str) -> None:
    app = Celery("garbage", broker=redis_url, backend="cache+memory://", set_as_current=False)

    @singleton_task(app=app, name="garbage.work", key="{number}")
    def work(number: int, secret: object) -> None: ...

    app.finalize()
    secret = Secret()
    watched = weakref.ref(secret)
    gc.collect()
    gc.disable()
    try:
        assert work.apply((1, secret)).state == "SUCCESS"
        del secret
        assert watched() is None
    finally:
        gc.enable()
