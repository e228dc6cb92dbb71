"""Aborts the body of a task whose lease is lost (``on_lost="abort"``), by the means of its pool.

The watchdog, a thread of the worker's main process, finds the loss. It calls the function that was set on the lease
record when the body began. The exception must be raised inside the body and nowhere else. After the body come the
release, Celery's own code and the next task, which must not be interrupted.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from importlib import import_module

from ..errors import LockLost
from ..locking.lease_table import BodyAborter, LeaseRecord
from ..utils import threads
from ..utils.greenlets import hub_bridge

__all__ = [
    "STOP_SIGNAL",
    "aborter_for_pool",
]

#: The signal that the main process sends to a pool child. SIGUSR1 is taken: it is Celery's soft time limit.
STOP_SIGNAL = signal.SIGUSR2


def aborter_for_pool(pool: type) -> BodyAborter | None:
    """Return the aborter for the bodies of this pool; None if only ``lease.ensure()`` can stop a body.

    None is for the solo pool, for example: it runs bodies in the thread that also talks to the broker.
    """
    # Compare names: importing the modules of unused pools would need their libraries.
    for module in (ancestor.__module__ for ancestor in pool.__mro__):
        if module in _BY_MODULE:
            return _BY_MODULE[module]()
    return None


class _SignalAborter:
    """Aborts a body in a pool child by a signal.

    The body runs in the child's main thread, and Python runs signal handlers in that thread.
    """

    def __init__(self) -> None:
        self._bodies: list[LeaseRecord] = []
        self._installed = False

    def enter(self, record: LeaseRecord) -> None:
        if not self._installed:
            signal.signal(STOP_SIGNAL, self._signalled)
            self._installed = True
        self._bodies.append(record)
        record.on_loss(_signalled_by_main_process)

    def leave(self, record: LeaseRecord) -> None:
        record.on_loss(None)
        if record in self._bodies:
            self._bodies.remove(record)

    def _signalled(self, *_: object) -> None:
        for record in self._bodies:
            if record.lost:
                self._bodies.remove(record)
                raise LockLost


class _ThreadAborter:
    """Aborts a body by an asynchronous exception, which Python raises at the thread's next instruction.

    Source: https://docs.python.org/3/c-api/init.html#c.PyThreadState_SetAsyncExc
    """

    def __init__(self) -> None:
        self._bodies: dict[str, _ThreadBody] = {}

    def enter(self, record: LeaseRecord) -> None:
        body = self._bodies[record.acquisition] = _ThreadBody()
        record.on_loss(body.stop)

    def leave(self, record: LeaseRecord) -> None:
        record.on_loss(None)
        if (body := self._bodies.get(record.acquisition)) is not None:
            body.end()
            self._bodies.pop(record.acquisition, None)


class _ThreadBody:
    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._inside = True
        self._stopping = self._stopped = False

    def stop(self) -> None:
        self._stopping = True
        if self._inside:
            self._stopped = True
            self._raise(LockLost)
        self._stopping = False

    def end(self) -> None:
        # Clear the flag first: no new exception is raised after that. Then wait for a running `stop`, and cancel its
        # exception, which would otherwise be raised in the release or in the next task.
        self._inside = False
        while self._stopping:
            threads.sleep(0.0001)
        if self._stopped:
            self._raise(None)

    def _raise(self, error: type[LockLost] | None) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread), None if error is None else ctypes.py_object(error)
        )


class _GreenletAborter:
    """Aborts a body by an exception thrown into its greenlet.

    A callback of the greenlet's own hub throws it, so the body cannot end between the check and the throw.
    """

    _library: str

    def __init__(self) -> None:
        self._inside: set[str] = set()

    def enter(self, record: LeaseRecord) -> None:
        acquisition = record.acquisition
        self._inside.add(acquisition)
        throw = self._thrower()

        def abort() -> None:
            if acquisition in self._inside:
                self._inside.discard(acquisition)
                throw()

        bridge = hub_bridge(self._library)
        record.on_loss(lambda: bridge.soon(abort))

    def leave(self, record: LeaseRecord) -> None:
        record.on_loss(None)
        self._inside.discard(record.acquisition)

    def _thrower(self) -> Callable[[], None]:
        raise NotImplementedError


class _GeventAborter(_GreenletAborter):
    _library = "gevent"

    def _thrower(self) -> Callable[[], None]:
        greenlet = import_module("gevent").getcurrent()
        return lambda: greenlet.throw(LockLost())


class _EventletAborter(_GreenletAborter):
    _library = "eventlet"

    def _thrower(self) -> Callable[[], None]:
        eventlet = import_module("eventlet")
        greenlet = eventlet.getcurrent()
        return lambda: eventlet.kill(greenlet, LockLost())


def _signalled_by_main_process() -> None:
    """Do nothing: the main process sees the loss in the shared lease table, and sends the signal."""


_BY_MODULE: dict[str, Callable[[], BodyAborter]] = {
    "celery.concurrency.prefork": _SignalAborter,
    "celery.concurrency.thread": _ThreadAborter,
    "celery.concurrency.gevent": _GeventAborter,
    "celery.concurrency.eventlet": _EventletAborter,
}
