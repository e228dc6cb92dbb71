"""Stops the body of a task whose lease is lost (``on_lost="abort"``), in the way that its pool allows.

The keeper, a thread of the worker's main process, finds the loss; what it calls is given to the slot when the body
begins. Whatever the way, the exception must strike in the body and nowhere else: behind it stand the release, Celery's
own code, and the next task.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from importlib import import_module

from ..errors import LockLost
from ..locking.lease_table import BodyAborter, LeaseRecord
from ..utils import threads as native
from ..utils.greenlets import hub_bridge

__all__ = [
    "STOP_SIGNAL",
    "aborter_for_pool",
]

#: Sent by the main process to a pool child. Not SIGUSR1, which is Celery's soft time limit.
STOP_SIGNAL = signal.SIGUSR2


def aborter_for_pool(pool: type) -> BodyAborter | None:
    """The stopper for bodies of this pool; None where only ``lease.ensure()`` stops one.

    A solo pool runs bodies in the thread that also talks to the broker.
    """
    # By name: importing the modules of pools that are not used would need their libraries.
    for module in (ancestor.__module__ for ancestor in pool.__mro__):
        if module in _BY_MODULE:
            return _BY_MODULE[module]()
    return None


class _SignalStopper:
    """In a pool child the body runs in the main thread, and there Python runs the handlers of signals."""

    def __init__(self) -> None:
        self._bodies: list[LeaseRecord] = []
        self._installed = False

    def enter(self, slot: LeaseRecord) -> None:
        if not self._installed:
            signal.signal(STOP_SIGNAL, self._signalled)
            self._installed = True
        self._bodies.append(slot)
        slot.on_loss(_in_another_process)

    def leave(self, slot: LeaseRecord) -> None:
        slot.on_loss(None)
        if slot in self._bodies:
            self._bodies.remove(slot)

    def _signalled(self, *_: object) -> None:
        for slot in self._bodies:
            if slot.lost:
                self._bodies.remove(slot)
                raise LockLost


class _ThreadStopper:
    """An asynchronous exception, which Python raises at the thread's next step.

    Source: https://docs.python.org/3/c-api/init.html#c.PyThreadState_SetAsyncExc
    """

    def __init__(self) -> None:
        self._bodies: dict[str, _ThreadBody] = {}

    def enter(self, slot: LeaseRecord) -> None:
        body = self._bodies[slot.acquisition] = _ThreadBody()
        slot.on_loss(body.stop)

    def leave(self, slot: LeaseRecord) -> None:
        slot.on_loss(None)
        if (body := self._bodies.get(slot.acquisition)) is not None:
            body.end()
            self._bodies.pop(slot.acquisition, None)


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
        # In this order: from now on nothing is raised but what is under way, and that is waited for and taken back.
        self._inside = False
        while self._stopping:
            native.sleep(0.0001)
        if self._stopped:
            self._raise(None)

    def _raise(self, error: type[LockLost] | None) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread), None if error is None else ctypes.py_object(error)
        )


class _GreenStopper:
    """Throws into the greenlet from a step of its own hub, so that nothing comes between look and throw."""

    _library: str

    def __init__(self) -> None:
        self._inside: set[str] = set()

    def enter(self, slot: LeaseRecord) -> None:
        acquisition = slot.acquisition
        self._inside.add(acquisition)
        throw = self._thrower()

        def strike() -> None:
            if acquisition in self._inside:
                self._inside.discard(acquisition)
                throw()

        bell = hub_bridge(self._library)
        slot.on_loss(lambda: bell.soon(strike))

    def leave(self, slot: LeaseRecord) -> None:
        slot.on_loss(None)
        self._inside.discard(slot.acquisition)

    def _thrower(self) -> Callable[[], None]:
        raise NotImplementedError


class _GeventStopper(_GreenStopper):
    _library = "gevent"

    def _thrower(self) -> Callable[[], None]:
        greenlet = import_module("gevent").getcurrent()
        return lambda: greenlet.throw(LockLost())


class _EventletStopper(_GreenStopper):
    _library = "eventlet"

    def _thrower(self) -> Callable[[], None]:
        eventlet = import_module("eventlet")
        greenlet = eventlet.getcurrent()
        return lambda: eventlet.kill(greenlet, LockLost())


def _in_another_process() -> None:
    """The main process reads in the shared slot that its child is to be told, and sends the signal."""


_BY_MODULE: dict[str, Callable[[], BodyAborter]] = {
    "celery.concurrency.prefork": _SignalStopper,
    "celery.concurrency.thread": _ThreadStopper,
    "celery.concurrency.gevent": _GeventStopper,
    "celery.concurrency.eventlet": _EventletStopper,
}
