"""Writes the history: in a worker every receipt, delivery and entry into a body, anywhere what is published.

It looks at Celery and at the bodies only, never at the library: a fault of the locks cannot hide itself here.
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
    # Signals hold their receivers weakly by default, and these are local.
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
            # Where the tracer looks for the body: inside the lock, and the shop knows nothing of it.
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
    """The shop's tasks carry what they are about as their first argument; a report without one is alone."""
    return str(args[0]) if args else ""


def _fact(what: str, **known: str) -> Fact:
    return Fact(what, time.monotonic(), os.getpid(), **known)
