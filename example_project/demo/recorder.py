"""Write the history: receipts, deliveries and entries into bodies in a worker, publications anywhere.

It observes Celery and the bodies, never the library: a fault of the locks cannot hide here.
"""

import functools
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from celery import Celery, current_task, signals

from example_project.demo.history import Fact, History


def install(app: Celery, history: History) -> None:
    # Not weakly, as signals do by default: these receivers are local.
    signals.after_task_publish.connect(_on_publish(history), weak=False)
    signals.task_received.connect(_on_receipt(history), weak=False)
    signals.task_prerun.connect(_on_delivery(history, "deliver"), weak=False)
    signals.task_postrun.connect(_on_delivery(history, "part"), weak=False)
    signals.worker_ready.connect(_on_ready(history), weak=False)
    signals.beat_init.connect(_on_ready(history), weak=False)
    app.loader.import_default_modules()
    app.finalize()
    for name, task in app.tasks.items():
        if name.startswith("shop."):
            # The tracer reads the body from here, so it is recorded inside the lock.
            setattr(task, "run", _recorded(task.run, name, history))  # noqa: B010  # mypy: a method


def _recorded(run: Callable[..., Any], name: str, history: History) -> Callable[..., Any]:
    @functools.wraps(run)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        request = current_task.request
        entry = {"task": name, "task_id": str(request.id), "subject": _subject(args), "run": uuid.uuid4().hex}
        if tick := (request.headers or {}).get("dlock_tick"):
            entry["tick"] = str(tick["due"])
        history.write(_fact("enter", **entry))
        try:
            return run(*args, **kwargs)
        finally:
            history.write(_fact("leave", **entry))

    return recorded


def _on_publish(history: History) -> Callable[..., None]:
    def publish(sender: str, headers: dict[str, Any], body: Sequence[Any], **_: Any) -> None:
        history.write(_fact("publish", task=sender, task_id=headers["id"], subject=_subject(body[0])))

    return publish


def _on_receipt(history: History) -> Callable[..., None]:
    def receive(request: Any, **_: Any) -> None:
        history.write(_fact("receive", task=request.name, task_id=request.id))

    return receive


def _on_delivery(history: History, what: str) -> Callable[..., None]:
    def deliver(sender: Any, task_id: str, args: Sequence[Any], **_: Any) -> None:
        history.write(_fact(what, task=sender.name, task_id=task_id, subject=_subject(args)))

    return deliver


def _on_ready(history: History) -> Callable[..., None]:
    def ready(**_: Any) -> None:
        history.write(_fact("ready"))

    return ready


def _subject(args: Sequence[Any]) -> str:
    """Return the first argument, which is the subject of the shop's tasks; "" for a report without one."""
    return str(args[0]) if args else ""


def _fact(what: str, **known: str) -> Fact:
    return Fact(what, time.monotonic(), os.getpid(), **known)
