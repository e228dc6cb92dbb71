"""Counters of a worker: one row for each thread, sums of living and dead processes, and the samples made of them."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlock.counters.catalog import METRICS, OTHER, metric
from celery_dlock.counters.meter import Counts, Meter, Sample
from celery_dlock.counters.recorder import Recorder, _failed
from celery_dlock.counters.table import MAX_TASKS, CounterTable, Layout
from celery_dlock.errors import (
    NotConfirmed,
    ReplyLost,
    ReplyTimeout,
    StoreNotReady,
    StoreQuarantined,
    StoreRefused,
    StoreUnavailable,
)
from celery_dlock.locking.events import LossCause


def values(meter: Meter, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of one metric that are not 0."""
    (samples,) = (samples for found, samples in meter.read() if found.name == name)
    return {sample.labels: sample.value for sample in samples if sample.value}


def histogram(meter: Meter, name: str) -> Sample:
    (samples,) = (samples for found, samples in meter.read() if found.name == name)
    (sample,) = samples
    return sample


def test_each_metric_and_label_value_has_cells_of_its_own() -> None:
    meter = Meter(["a", "b"])
    expected: dict[str, dict[tuple[str, ...], float]] = {}
    number = 0
    for found in METRICS:
        if found.kind != "counter":
            continue
        for task in ["a", "b", OTHER] if found.per_task else [None]:
            for value in found.values or ("",):
                if (found.name, value) == ("released", "holder"):
                    continue  # it is made of held_seconds
                number += 1
                labels = (*([task] if task else []), *([value] if value else []))
                expected.setdefault(found.name, {})[labels] = number
                for _ in range(number):
                    meter.recorder.count(found.name, task, value)
    assert {name: values(meter, name) for name in expected} == expected


def test_observation_falls_into_the_first_bucket_whose_bound_is_not_smaller() -> None:
    meter = Meter([])
    bounds = metric("renewal_margin_seconds").bounds
    for seconds in (0.0, bounds[0], bounds[1], bounds[-1], bounds[-1] + 1):
        meter.recorder.observe("renewal_margin_seconds", seconds)
    sample = histogram(meter, "renewal_margin_seconds")
    assert sample.buckets == (2, 1, *[0] * (len(bounds) - 3), 1, 1)
    assert sample.value == pytest.approx(bounds[0] + bounds[1] + 2 * bounds[-1] + 1)


def test_calls_that_did_not_wait_are_in_the_first_bucket_of_wait_seconds() -> None:
    meter = Meter(["a"])
    taken = meter.recorder.taken
    for _ in range(3):
        taken(SimpleNamespace(task="a"))
    meter.recorder.waited("a", 2.0)
    sample = histogram(meter, "wait_seconds")
    assert (sample.labels, sample.value, sum(sample.buckets), sample.buckets[0]) == (("a",), 2.0, 3, 2)
    assert values(meter, "conflicts") == {("a", "waited"): 1}


def test_tasks_above_the_limit_share_one_label() -> None:
    names = [f"task{number:03}" for number in range(MAX_TASKS + 1)]
    meter = Meter(names)
    for name in (names[0], names[-1], "unregistered", None):
        meter.recorder.count("bypassed", name)
    assert values(meter, "bypassed") == {(names[0],): 1, (OTHER,): 3}


@pytest.mark.invariant("counters-are-exact")
def test_threads_that_count_at_once_lose_no_count() -> None:
    """Each has a row of its own; without, one in thousands of increments would be lost on Python 3.10."""
    meter, each = Meter(["a"]), 5_000
    taken, released = meter.recorder.taken, meter.recorder.released

    def work() -> None:
        for _ in range(each):
            lease: Any = SimpleNamespace(task="a")
            taken(lease)
            released(lease)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(meter, "acquired") == {("a",): 8 * each}
    assert values(meter, "released") == {("a", "holder"): 8 * each}


@pytest.mark.invariant("counters-are-exact")
def test_row_of_an_ended_thread_goes_on_with_its_counts() -> None:
    layout = Layout([])
    table = CounterTable(layout)
    rows = []

    def work() -> None:
        row = table.open_row()
        rows.append(row.start)
        table.words[row.start] += 1

    for _ in range(100):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert set(rows) == {0}
    assert table.words[0] == 100


@pytest.mark.invariant("counters-are-exact")
@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_counts_of_a_dead_child_are_kept_and_its_memory_is_not(number: int) -> None:
    meter, ended = Meter(["a"]), False
    for _ in range(3):
        table = meter.open_table()
        child = os.fork()
        if not child:
            meter.adopt(table)
            meter.recorder.count("bypassed", "a")
            if number:
                os.kill(os.getpid(), number)
            os._exit(0)
        meter.watch(table, lambda: ended)
        os.waitpid(child, 0)
    assert values(meter, "bypassed") == {("a",): 3}
    ended = True
    assert values(meter, "bypassed") == {("a",): 3}
    assert meter._children == []
    assert values(meter, "bypassed") == {("a",): 3}


def test_process_that_a_body_forks_writes_into_no_row_of_the_child() -> None:
    meter = Meter(["a"])
    meter.recorder.count("bypassed", "a")
    child = os.fork()
    if not child:
        meter.recorder.count("bypassed", "a")
        os._exit(0)
    os.waitpid(child, 0)
    assert values(meter, "bypassed") == {("a",): 1}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (None, "skipped"),
        (ReplyTimeout(), "timeout"),
        (ReplyLost(), "reply_lost"),
        (NotConfirmed(), "not_confirmed"),
        (StoreQuarantined(), "quarantined"),
        (StoreRefused(), "refused"),
        (StoreNotReady(), "not_ready"),
        (StoreUnavailable(), "unreachable"),
    ],
)
def test_error_of_the_store_counts_as_its_most_special_kind(error: StoreUnavailable | None, kind: str) -> None:
    meter = Meter([])
    meter.recorder.store_failed(error)
    assert values(meter, "store_errors") == {(kind,): 1}


def test_each_cause_of_a_loss_is_a_value_of_the_metric() -> None:
    assert tuple(cause.value for cause in LossCause) == metric("lost").values


@pytest.mark.parametrize(
    "broken",
    [
        lambda recorder: recorder.count("lost", "a", "no such cause"),
        lambda recorder: recorder.count("no such metric"),
        lambda recorder: recorder.observe("no such histogram", 1.0),
        lambda recorder: recorder.observe("held_seconds", None, "a"),
        lambda recorder: recorder.timed("no such command", lambda: None)(),
    ],
)
def test_error_in_a_count_reaches_no_caller_and_is_logged_once(
    broken: Callable[[Recorder], object], caplog: pytest.LogCaptureFixture
) -> None:
    """The watchdog counts in its rounds: an error would stop the renewals of all leases that follow."""
    _failed.clear()
    recorder = Meter(["a"]).recorder
    with caplog.at_level(logging.ERROR, "celery_dlock"):
        broken(recorder)
        broken(recorder)
    assert len([text for text in caplog.messages if "is not counted; this changes no lock" in text]) == 1


def test_nothing_is_counted_while_metrics_are_off() -> None:
    counts = Counts()
    counts.count("bypassed", "a")
    counts.observe("wait_seconds", 1.0, "a")
    assert counts.meter is None


def test_lease_whose_start_was_interrupted_counts_as_taken_now() -> None:
    """An exception struck before the time was set: the release must neither fail nor count the uptime."""
    from celery_dlock.locking.lease import Lease  # noqa: PLC0415

    meter = Meter(["a"])
    released = meter.recorder.released
    lease: Any = Lease.__new__(Lease)
    lease.task = "a"
    released(lease)
    assert values(meter, "held_seconds").get(("a",), 0) < 1
    assert values(meter, "released") == {("a", "holder"): 1}
