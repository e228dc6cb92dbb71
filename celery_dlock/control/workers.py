"""The answers of live workers about their locks and watchdogs, asked through Celery's remote control."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kombu.exceptions import KombuError

from ..utils.background import result_in_time

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["COMMAND", "COUNTERS", "LEASES", "LOST_WITHIN", "HeldLease", "WorkerView", "Workers", "ask_workers"]

#: The name of the inspect command.
COMMAND: Final = "dlock"
#: The metrics of which a worker tells its counters.
COUNTERS: Final = ("acquired", "conflicts", "lost")
#: Leases that one worker names in its answer.
LEASES: Final = 1000
#: Seconds of which a worker tells how many leases were lost.
LOST_WITHIN: Final = 3600.0
#: Seconds to connect to the broker.
CONNECT_TIMEOUT: Final = 2

Watchdog = Literal["", "ok", "idle", "late", "dead"]


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lock that a worker holds, by its own account.

    Args:
        name: The lock name.
        acquisition: The acquisition, as in :class:`HolderView`.
        task: The name of its task, or the start of the lock name if the worker does not know the task.
        task_id: The id of its task; "" if the worker does not know it.
        pid: The process that holds it.
        expires_in: Seconds until the lease expires, unless it is renewed.
        ttl: The ttl of the lease in seconds.
    """

    name: str
    acquisition: str
    task: str
    task_id: str
    pid: int
    expires_in: float
    ttl: float


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker that answered.

    Args:
        worker: Its node name.
        version: Its version of celery-dlock.
        pool: Its pool: ``"prefork"``, ``"threads"``, ``"gevent"`` and so on.
        pid: The id of its main process.
        watchdog: ``"ok"``. ``"idle"``: it has nothing to watch. ``"late"``: its last round was more than 10 s ago.
            ``"dead"``: leases are held, and no watchdog runs. "" if there is a ``problem``.
        scanned: Seconds since the last round of the watchdog; None before the first one.
        held: The number of leases that it holds.
        leases: These leases, at most 1000.
        problem: The reason for which it said nothing else; "" if it did.
        lost: The number of leases that its processes lost in the last hour, at most 1000. None: its celery-dlock is
            older, and does not tell.
        counters: Its counters ``acquired``, ``conflicts`` and ``lost`` since its start: by task, and then by the value
            of the metric's other label, "" for none. None: it counts nothing, because ``dlock_metrics_port`` is not
            set and no ``WorkerCollector`` is registered.
        wire: Its wire version. An older worker leaves the messages of newer ones to them.
    """

    worker: str
    version: str = ""
    pool: str = ""
    pid: int = 0
    watchdog: Watchdog = ""
    scanned: float | None = None
    held: int = 0
    leases: Sequence[HeldLease] = ()
    problem: str = ""
    lost: int | None = None
    counters: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None
    wire: int = 1


@dataclass(frozen=True, slots=True)
class Workers:
    """The answers of live workers.

    A worker that does not answer in time is missing. A worker of the pool ``solo`` answers only between two tasks.

    Args:
        workers: The workers that answered, by node name.
        problem: The reason for which there is no answer; "" if there is one.
        unreachable: The broker did not answer.
    """

    workers: Sequence[WorkerView] = ()
    problem: str = ""
    unreachable: bool = False


def ask_workers(app: Celery, timeout: float) -> Workers:
    """Ask all live workers. Raises nothing: a problem is part of the answer."""
    try:
        with app.connection_for_write() as connection:
            transport = connection.transport_cls
            fanout = connection.supports_exchange_type("fanout")
    except Exception as error:  # noqa: BLE001  # a transport whose library is missing raises ImportError, for example
        return Workers((), f"the broker cannot be used: {error}", unreachable=True)
    if not fanout:
        return Workers((), f"the broker ({transport}) has no remote control, so no worker can be asked")
    if not app.conf.worker_enable_remote_control:
        return Workers((), "remote control is off (worker_enable_remote_control), so no worker can be asked")
    # The broker may hang: the transports of kombu have no timeout in common.
    seconds = timeout + 2 * CONNECT_TIMEOUT
    silent = Workers((), f"the broker did not answer within {seconds:g} s", unreachable=True)
    return result_in_time("ask-workers", lambda: _ask(app, timeout), seconds) or silent


def _ask(app: Celery, timeout: float) -> Workers:
    try:
        with app.connection_for_write(connect_timeout=CONNECT_TIMEOUT) as connection:
            connection.ensure_connection(max_retries=1, timeout=CONNECT_TIMEOUT)
            replies = app.control.broadcast(COMMAND, reply=True, timeout=timeout, connection=connection)
    except (KombuError, OSError) as error:
        return Workers((), f"the broker did not answer: {error}", unreachable=True)
    except Exception as error:  # noqa: BLE001  # kombu's transports raise errors of their own libraries
        return Workers((), f"the broker did not answer: {error!r}", unreachable=True)
    views = [view for reply in replies or () for view in _views(reply)]
    if not views:
        return Workers((), f"no worker answered within {timeout:g} s")
    return Workers(tuple(sorted(views, key=lambda view: (view.worker, view.pid))))


# Any client of the broker can answer, so nothing of a reply is taken for granted.


def _views(reply: object) -> Iterator[WorkerView]:
    if isinstance(reply, Mapping):
        for node, answer in reply.items():
            yield _view(str(node), answer)


def _view(node: str, answer: Any) -> WorkerView:
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
        if "error" in answer:
            text = str(answer["error"])
            unknown = "it does not know the command: no singleton task is loaded, or its celery-dlock is older"
            return WorkerView(node, problem=unknown if COMMAND in text and "KeyError" in text else text)
        told = {fact: read(answer[fact]) for fact, read in _FACTS.items() if answer.get(fact) is not None}
        return WorkerView(node, str(answer["version"]), **told)
    return WorkerView(node, problem="its answer cannot be read: its celery-dlock is of another version")


def _leases(told: Any) -> tuple[HeldLease, ...]:
    types = (str, str, str, str, int, float, float)
    return tuple(HeldLease(*(of(fact) for of, fact in zip(types, lease, strict=True))) for lease in told)


def _counters(told: Any) -> dict[str, dict[str, dict[str, int]]]:
    return {
        metric: {str(task): {str(value): int(number) for value, number in its.items()} for task, its in tasks.items()}
        for metric, tasks in told.items()
        if metric in COUNTERS
    }


#: What reads each fact of a view in an answer, which may lack it.
_FACTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "pool": str, "pid": int, "watchdog": str, "scanned": float, "held": int, "leases": _leases, "problem": str,
    "lost": int, "counters": _counters, "wire": int,
}  # fmt: skip
