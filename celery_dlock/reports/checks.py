"""The checks of ``dlock check``: the store's setup, what waits for a decision in it, and the queues of the app."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..store.server_model import may_evict
from .durations import parse_duration

if TYPE_CHECKING:
    from celery import Celery

    from ..control import Counts, Health, Workers

__all__ = ["MAX_HOLD", "MAX_WAIT", "Check", "checks_of", "queue_checks", "store_checks", "version_check"]

#: Seconds by which the clock of a server may differ.
CLOCK: Final = 1.0
#: The default age of the oldest waiter, and of the oldest lock, above which a check finds a problem.
MAX_WAIT, MAX_HOLD = "10m", "6h"
#: The smallest delivery limit that is no problem. Each restart and each lost connection of a worker counts once.
MIN_DELIVERY_LIMIT: Final = 5


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Args:
        check: Its name.
        found: What it found.
        problem: Whether that is a problem.
    """

    check: str
    found: str
    problem: bool = False

    @property
    def result(self) -> str:
        """The result, as lists show it."""
        return "PROBLEM" if self.problem else "ok"


def checks_of(app: Celery, health: Health, counts: Counts, workers: Workers | None, **limits: float) -> list[Check]:
    """Return all checks of a store that answers. The limits are those of :func:`limit_checks`.

    Args:
        app: The app.
        health: The state of its store.
        counts: The numbers of everything in the store.
        workers: The answers of live workers; None if there are none yet.
        limits: What is no problem yet.
    """
    versions = [version_check(workers)] if workers else []
    return [*store_checks(health), *limit_checks(counts, **limits), *queue_checks(app), *versions]


def store_checks(health: Health) -> Iterator[Check]:
    """Yield the checks of the setup of a store."""
    if not health.up:
        yield Check("store", health.error, problem=True)
        return
    yield Check("store", "it answers")
    yield Check("eviction", health.eviction or "unknown", problem=may_evict(health.eviction))
    durable = "survives a restart" if health.durable else "is lost at a restart of the store"
    yield Check("persistence", f"the data {durable}")
    yield Check("replicas", "unknown" if health.replicas is None else str(health.replicas))
    if health.polls:
        yield Check("waiting calls", "poll, because a connection pooler keeps releases from waking them")
    for server, offset in health.clock_offsets.items():
        yield Check(f"clock {server}".strip(), f"{offset:+.3f} s", problem=abs(offset) > CLOCK)


def limit_checks(
    counts: Counts,
    *,
    max_wait: float = parse_duration(MAX_WAIT),
    max_hold: float = parse_duration(MAX_HOLD),
    max_dead: float = 0,
    max_unknown: float = 0,
) -> Iterator[Check]:
    """Yield the checks of what is in a store. These counts could be made, so the user has the rights to see it."""
    yield Check("rights", "this user can see all locks")
    wait, hold = (max(ages.values(), default=0.0) for ages in (counts.oldest_wait, counts.oldest_hold))
    waiters, locks = (sum(number.values()) for number in (counts.waiting, counts.locks))
    yield Check("oldest waiter", f"{wait:.0f} s of {waiters} waiters", problem=wait > max_wait)
    yield Check("oldest lock", f"{hold:.0f} s of {locks} locks", problem=hold > max_hold)
    dead, unknown = sum(counts.dead_letters.values()), sum(counts.unknown_outcomes.values())
    yield Check("dead letters", str(dead), problem=dead > max_dead)
    yield Check("unknown outcomes", str(unknown), problem=unknown > max_unknown)
    endless = counts.without_expiry
    yield Check("expiries", f"{endless} keys lack theirs" if endless else "each key has one", problem=endless > 0)


def queue_checks(app: Celery) -> Iterator[Check]:
    """Yield the checks of the queues that the app declares, if its broker is RabbitMQ.

    A quorum queue drops a message at its delivery limit. Over AMQP, only the declared arguments are visible: a policy
    may set a lower limit.
    """
    from ..messaging.publishing import confirms  # noqa: PLC0415  # every celery command imports this module
    from ..messaging.routing import declared_limit, is_quorum  # noqa: PLC0415

    if not confirms(app.connection_for_write()):
        return
    for name, queue in sorted(app.amqp.queues.items()):
        limit = declared_limit(queue)
        if not is_quorum(queue):
            found = "not declared as a quorum queue"
        elif limit is None:
            found = "quorum queue, no delivery limit declared: 20 in RabbitMQ 4, none in RabbitMQ 3, or a policy's"
        else:
            found = f"quorum queue, delivery limit {limit}, or a policy's if that is lower"
        yield Check(f"queue {name}", found, problem=limit is not None and limit < MIN_DELIVERY_LIMIT)


def version_check(found: Workers) -> Check:
    """Return the check of the versions of live workers. That none answers is no problem of the store."""
    versions = Counter((view.wire, view.version) for view in found.workers if view.version)
    if not versions:
        return Check("versions", found.problem or "no worker told its version")
    texts = [f"{version} on {number}" for (_, version), number in sorted(versions.items())]
    wires = sorted({wire for wire, _ in versions})
    if len(wires) > 1:
        texts.append(f"wire versions {wires[0]} to {wires[-1]}: end the upgrade, or messages of the newer ones wait")
    return Check("versions", "; ".join(texts), problem=len(wires) > 1)
