"""Stops the body of a task if its lease is lost (``on_lost="abort"``), or if a newer call replaces it.

Each pool stops a body in its own way. The watchdog, a thread of the worker's main process, notices that a body has to
stop. It calls the function that was set on the lease record when the body began. That raises an exception in the body:
LockLost or Replaced. The exception must be raised nowhere else. After the body come the release, Celery's own code and
the next task, which must not be interrupted.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Collection
from importlib import import_module

from ..errors import LockLost
from ..locking.lease_table import BodyAborter, LeaseRecord
from ..messaging.results import Replaced
from ..options.derived import StopReason
from ..utils import threads
from ..utils.greenlets import hub_bridge

__all__ = [
    "STOP_SIGNAL",
    "aborter_for_pool",
]

#: The signal that the main process sends to a pool child. SIGUSR1 is taken: it is Celery's soft time limit.
STOP_SIGNAL = signal.SIGUSR2

#: Iterations of an empty loop in which Python surely raises a pending asynchronous exception. It checks for one in each
#: iteration, so 100 leave a wide margin, and they take microseconds.
CHECKS = 100
#: The exceptions that a body is stopped by.
_RAISED: dict[StopReason, type[Exception]] = {"lost": LockLost, "replaced": Replaced}


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
    """Stops a body in a pool child by a signal.

    The body runs in the child's main thread, and Python runs signal handlers in that thread.
    """

    def __init__(self) -> None:
        self._bodies: list[tuple[LeaseRecord, Collection[StopReason]]] = []
        self._installed = False

    def enter(self, record: LeaseRecord, reasons: Collection[StopReason], kill_after: float | None = None) -> None:
        if not self._installed:
            signal.signal(STOP_SIGNAL, self._signalled)
            self._installed = True
        self._bodies.append((record, reasons))
        record.on_stop(_signalled_by_main_process)
        if kill_after is not None:
            record.set_kill_after(kill_after)

    def leave(self, record: LeaseRecord) -> None:
        record.set_kill_after(None)
        record.on_stop(None)
        for body in self._bodies:
            if body[0] is record:
                self._bodies.remove(body)
                break

    # `ensure()` has raised `Replaced` in this body. Do not raise it a second time: that would disturb the cleanup.
    def told(self, record: LeaseRecord) -> None:
        for i, (entered, reasons) in enumerate(self._bodies):
            if entered is record:
                self._bodies[i] = record, _without_replaced(reasons)

    def _signalled(self, *_: object) -> None:
        for body in self._bodies:
            record, reasons = body
            reason: StopReason = "lost" if record.lost else "replaced"
            if reason in reasons and (record.lost or record.replaced):
                self._bodies.remove(body)
                record.on_stop(None)
                raise _RAISED[reason]


class _ThreadAborter:
    """Stops a body by an asynchronous exception, which Python raises at the thread's next instruction.

    Source: https://docs.python.org/3/c-api/init.html#c.PyThreadState_SetAsyncExc
    """

    def __init__(self) -> None:
        self._bodies: dict[str, _ThreadBody] = {}

    def enter(self, record: LeaseRecord, reasons: Collection[StopReason], kill_after: float | None = None) -> None:
        del kill_after  # the process runs other bodies too
        body = self._bodies[record.acquisition] = _ThreadBody(reasons)
        record.on_stop(body.stop)

    def told(self, record: LeaseRecord) -> None:
        if (body := self._bodies.get(record.acquisition)) is not None:
            body.told()

    def leave(self, record: LeaseRecord) -> None:
        record.on_stop(None)
        if (body := self._bodies.get(record.acquisition)) is not None:
            body.end()
            self._bodies.pop(record.acquisition, None)


class _ThreadBody:
    def __init__(self, reasons: Collection[StopReason]) -> None:
        self._reasons = reasons
        self._thread = threading.get_ident()
        self._inside = True
        self._stopping = self._stopped = False

    def stop(self, reason: StopReason) -> None:
        # Set `_stopping` before the other fields are read. `told` and `end` change those fields, and then wait until
        # `_stopping` is false.
        self._stopping = True
        if reason in self._reasons and self._inside and not self._stopped:
            self._stopped = True
            self._raise(_RAISED[reason])
        self._stopping = False

    def told(self) -> None:
        self._reasons = _without_replaced(self._reasons)
        self._cancel()

    def end(self) -> None:
        # Clear the flag first: no new exception is raised after that. Then cancel one that would otherwise be raised
        # in the release or in the next task.
        self._inside = False
        self._cancel()

    def _cancel(self) -> None:
        """Wait for a running `stop`, and swallow its exception if Python has not raised it yet.

        A second call of ``PyThreadState_SetAsyncExc``, with NULL, would cancel the exception too. But Python would then
        look for one at every check. That slows all threads. With ``sys.settrace``, a function under Python 3.11 then
        never ends.
        """
        try:
            while self._stopping:
                threads.sleep(0.0001)
            if self._stopped:
                for _ in range(CHECKS):
                    pass
        except tuple(_RAISED.values()):
            pass

    def _raise(self, error: type[Exception]) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(error))


class _GreenletAborter:
    """Stops a body by an exception thrown into its greenlet.

    A callback of the greenlet's own hub throws it, so the body cannot end between the check and the throw.
    """

    _library: str

    def __init__(self) -> None:
        #: By acquisition: the reasons for which the body may be stopped.
        self._inside: dict[str, Collection[StopReason]] = {}

    def enter(self, record: LeaseRecord, reasons: Collection[StopReason], kill_after: float | None = None) -> None:
        del kill_after  # the process runs other bodies too
        acquisition = record.acquisition
        self._inside[acquisition] = reasons
        throw = self._thrower()
        bridge = hub_bridge(self._library)

        def stop(reason: StopReason) -> None:
            def abort() -> None:
                if reason in self._inside.get(acquisition, ()):
                    self._inside.pop(acquisition, None)
                    throw(_RAISED[reason]())

            if reason in reasons:
                bridge.soon(abort)

        record.on_stop(stop)

    def told(self, record: LeaseRecord) -> None:
        if record.acquisition in self._inside:
            self._inside[record.acquisition] = _without_replaced(self._inside[record.acquisition])

    def leave(self, record: LeaseRecord) -> None:
        record.on_stop(None)
        self._inside.pop(record.acquisition, None)

    def _thrower(self) -> Callable[[Exception], object]:
        raise NotImplementedError


class _GeventAborter(_GreenletAborter):
    _library = "gevent"

    def _thrower(self) -> Callable[[Exception], object]:
        greenlet = import_module("gevent").getcurrent()
        throw: Callable[[Exception], object] = greenlet.throw
        return throw


class _EventletAborter(_GreenletAborter):
    _library = "eventlet"

    def _thrower(self) -> Callable[[Exception], object]:
        eventlet = import_module("eventlet")
        greenlet = eventlet.getcurrent()
        return lambda error: eventlet.kill(greenlet, error)


def _without_replaced(reasons: Collection[StopReason]) -> tuple[StopReason, ...]:
    return tuple(reason for reason in reasons if reason != "replaced")


def _signalled_by_main_process(_reason: StopReason) -> None:
    """Do nothing. Setting a function records in the shared lease table that the main process may send the signal."""


_BY_MODULE: dict[str, Callable[[], BodyAborter]] = {
    "celery.concurrency.prefork": _SignalAborter,
    "celery.concurrency.thread": _ThreadAborter,
    "celery.concurrency.gevent": _GeventAborter,
    "celery.concurrency.eventlet": _EventletAborter,
}
