"""The metrics: names, labels and texts, written once.

The exporters, the reference page (``tools/reference.py``) and the tests of the alert rules and of the dashboard read
this table.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

__all__ = ["METRICS", "OTHER", "PREFIX", "Metric", "metric"]

#: The start of every metric's name.
PREFIX: Final = "celery_dlock_"
#: The label ``task`` of what belongs to no registered task: a ``Lock`` outside of tasks, or a task above the limit.
OTHER: Final = "other"

_RUN: Final = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)
_MARGIN: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)
_STORE: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0)


class Metric(NamedTuple):
    """One metric.

    Args:
        name: Its name without :data:`PREFIX`, for a counter also without ``_total``.
        kind: Its type.
        meaning: One sentence for the reference page, and the help text of the exporter.
        per_task: Whether it has the label ``task``.
        label: The name of its other label; "" for none.
        values: The values of that label in a worker's counters; empty if any text is allowed.
        bounds: The upper bounds of a histogram's buckets, in seconds.
        source: ``worker``: counted by the processes of a worker. ``store``: read from the lock store.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    meaning: str
    per_task: bool = True
    label: str = ""
    values: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    source: Literal["worker", "store"] = "worker"

    @property
    def exported(self) -> str:
        """The name that Prometheus shows."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        return (*(("task",) if self.per_task else ()), *((self.label,) if self.label else ()))


#: Every metric. The first two stand first in a row of counters, because each run of a task changes them.
METRICS: Final = (
    Metric("acquired", "counter", "Locks taken, not counting nested entries of their owner."),
    Metric(
        "held_seconds",
        "histogram",
        "Seconds from taking a lock to its release by the holder. Other releases are not counted.",
        bounds=_RUN,
    ),
    Metric(
        "wait_seconds",
        "histogram",
        "Seconds that a call waited in its pool slot or in the queue before it took the lock; 0 if it did not wait. "
        "Delays of retries are not included.",
        bounds=_RUN,
    ),
    Metric("bypassed", "counter", "Bodies that ran without their lock (on_store_error='run')."),
    Metric(
        "bypassed_local",
        "counter",
        "Bodies that held their lock on their machine only (on_store_error='local').",
    ),
    Metric("misfired", "counter", "Ticks that came too late and were skipped (misfire_grace)."),
    Metric(
        "conflicts",
        "counter",
        "Calls that did not get their lock at once, by what became of them. A call may have several conflicts.",
        label="outcome",
        values=(
            "skipped",
            "retried",
            "queued",
            "waited",
            "raised",
            "returned",
            "replaced",
            "debounced",
            "duplicate",
        ),
    ),
    Metric(
        "released",
        "counter",
        "Locks released: by the watchdog after a death or a failed release, by crash recovery after the death of a "
        "worker. Releases by operators are only in their audit.",
        label="by",
        values=("holder", "watchdog", "crash_recovery"),
    ),
    Metric(
        "lost",
        "counter",
        "Leases that ended before their release. Forgotten: the store no longer knew them, also after a release by an "
        "operator. Unanswered: it did not answer in time.",
        label="cause",
        values=("forgotten", "unanswered", "max_hold", "time_limit"),
    ),
    Metric("unknown_outcomes", "counter", "Runs under once_per whose outcome became unknown."),
    Metric("dead_letters", "counter", "Parked messages that became dead letters."),
    Metric(
        "lost_grants",
        "counter",
        "Published grants that no worker took in time (dlock_grant_timeout).",
    ),
    Metric(
        "store_errors",
        "counter",
        "Commands that the lock store did not carry out. Skipped: not sent, because the circuit breaker was open.",
        per_task=False,
        label="kind",
        values=(
            "unreachable",
            "timeout",
            "reply_lost",
            "refused",
            "not_ready",
            "not_confirmed",
            "quarantined",
            "skipped",
        ),
    ),
    Metric(
        "renewal_margin_seconds",
        "histogram",
        "Seconds that a lease had left when it was renewed. Small values warn before a lease is lost.",
        per_task=False,
        bounds=_MARGIN,
    ),
    Metric(
        "store_seconds",
        "histogram",
        "Seconds that a command of the lock store took. All commands of the watchdog are measured, and about one of 32 "
        "of those of tasks.",
        per_task=False,
        label="command",
        values=("acquire", "release", "renew", "guard"),
        bounds=_STORE,
    ),
    *(
        Metric(name, "gauge", meaning, per_task=per_task, label=label, source="store")
        for name, meaning, per_task, label in (
            ("locks", "Locks that are held, granted or kept.", True, ""),
            ("waiting", "Waiters. All waiters of a lock count for the task of the first one.", True, ""),
            ("dead_letters", "Dead letters.", True, ""),
            ("unknown_outcomes", "Runs under once_per whose outcome is unknown.", True, ""),
            ("claims", "Claims of published messages (unique).", True, ""),
            ("oldest_hold_seconds", "Age of the oldest lock that is held or kept.", True, ""),
            ("oldest_wait_seconds", "Age of the oldest waiter.", True, ""),
            ("oldest_unknown_seconds", "Age of the oldest unknown outcome.", True, ""),
            ("store_up", "Whether the store answers.", False, "server"),
            ("store_clock_offset_seconds", "Seconds by which the server's clock is ahead.", False, "server"),
            ("scrape_seconds", "Seconds that the last reading of the store took.", False, ""),
        )
    ),
    Metric(
        "build_info", "gauge", "Always 1; the label is the version of celery-dlock.", per_task=False, label="version"
    ),
)


def metric(name: str) -> Metric:
    """Return the metric of this name, which must be in the table."""
    return next(found for found in METRICS if found.name == name)
