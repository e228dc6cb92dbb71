"""A worker that a test runs by hand: one message at a time, in the thread of the test."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import _state

from ..errors import DLockError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["HandWorker"]

#: Seconds that a message of the memory broker is waited for.
_PATIENCE = 0.02


class HandWorker:
    """A worker of Celery with the pool solo, whose loop does not run.

    Args:
        app: The app, with the broker ``memory://``.
        now: Returns the seconds of the monotonic clock, into which Celery converts ETAs.
    """

    def __init__(self, app: Celery, now: Callable[[], float]) -> None:
        transport = app.connection_for_write().transport_cls
        if transport != "memory":
            raise DLockError(f"cannot run messages by hand: the broker is {transport!r}, expected broker='memory://'")
        self._app = app
        self._timer = _Timer(now)
        worker: Any = app.WorkController
        self._worker = worker(
            app=app,
            pool="solo",
            concurrency=1,
            hostname="by-hand@testing",
            timer_cls=lambda **_options: self._timer,
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
        )
        consumer = self._worker.consumer
        # The blueprint calls the loop as its last step. This one returns, and run_next() takes its place.
        consumer.loop = self._begin
        consumer.start = lambda: consumer.blueprint.start(consumer)
        self._worker.blueprint.start(self._worker)
        # The pool forbids it, for the bodies of tasks; but the test itself runs in this thread.
        _state._set_task_join_will_block(False)  # type: ignore[attr-defined]  # noqa: FBT003, SLF001  # no other way

    @staticmethod
    def _begin(consumer: Any, *_args: Any) -> None:
        """Begin to consume, as the loop does first."""
        consumer.task_consumer.on_message = consumer.create_task_handler()
        consumer.task_consumer.consume()
        consumer.connection.transport.polling_interval = _PATIENCE / 4  # one second by default

    def run_next(self) -> bool:
        """Run the next message, or let it wait for its ETA. Return false if there is none."""
        # The solo pool looks the task up in the current app.
        current = _state._tls.current_app  # type: ignore[attr-defined]  # noqa: SLF001  # not in the stubs
        self._app.set_current()
        try:
            return self._run_next()
        finally:
            _state._tls.current_app = current  # type: ignore[attr-defined]  # noqa: SLF001

    def _run_next(self) -> bool:
        consumer = self._worker.consumer
        ran = self._worker.state.total_count
        before = sum(ran.values())
        while True:
            if self._timer.run_due() or sum(ran.values()) > before:
                consumer.perform_pending_operations()
                return True
            if consumer.qos.prev != consumer.qos.value:
                consumer.qos.update()
            try:
                consumer.connection.drain_events(timeout=_PATIENCE)
            except TimeoutError:
                return False

    def stop(self) -> None:
        """Close the connections of the worker. Messages that it did not run are lost with the broker."""
        self._worker.consumer.blueprint.stop(self._worker.consumer, terminate=True)
        self._worker.blueprint.stop(self._worker, terminate=True)


class _Entry:
    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self._call = None

    def __call__(self) -> bool:
        if self._call is None:
            return False
        self._call()
        return True


class _Timer:
    """A timer for the worker: ETAs come by the test's clock, and nothing is repeated in the background."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._numbers = itertools.count()
        self._entries: list[tuple[float, int, _Entry]] = []

    def call_at(self, eta: float, fun: Callable[..., object], args: Any = (), kwargs: Any = None, **_: Any) -> _Entry:
        entry = _Entry(lambda: fun(*args, **(kwargs or {})))
        heapq.heappush(self._entries, (eta, next(self._numbers), entry))
        return entry

    def call_after(self, secs: float, fun: Callable[..., object], *args: Any, **kwargs: Any) -> _Entry:
        return self.call_at(self._now() + secs, fun, *args, **kwargs)

    def call_repeatedly(self, _secs: float, fun: Callable[..., object], *_args: Any, **_kwargs: Any) -> _Entry:
        return _Entry(fun)

    def run_due(self) -> bool:
        """Run the next entry whose time has come. Return false if there is none."""
        while self._entries and self._entries[0][0] <= self._now():
            if heapq.heappop(self._entries)[2]():
                return True
        return False

    def clear(self) -> None:
        self._entries.clear()

    def stop(self) -> None:
        self.clear()

    def ensure_started(self) -> None:
        """Do nothing: there is no thread."""
