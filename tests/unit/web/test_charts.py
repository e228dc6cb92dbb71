"""The charts of the last hour, in numbers."""

from collections.abc import Mapping

import pytest

from celery_dlock.web.charts import HEIGHT, WIDTH, Chart, charts, life
from celery_dlock.web.samples import Change, Sample

#: 15:29:30 UTC, so the last bar is that of 15:29, and the first one that of 14:30.
NOW = 1_800_026_970.0


def sample(ago: float, *, waiting: int = 0, since: float | None = None, **counted: int) -> Sample:
    """Return a sample. `counted` names a metric and the value of its label, as acquired_ or conflicts_skipped."""
    keys: Mapping[tuple[str, str, str], int] = {
        (name.partition("_")[0], "pay", name.partition("_")[2]): number for name, number in counted.items()
    }
    at = NOW - ago
    return Sample(at - 30 if since is None else NOW - since, at, {"pay": waiting}, keys, 1)


def named(title: str, samples: list[Sample], task: str | None = None) -> Chart:
    (found,) = (chart for chart in charts(samples, NOW, task) if chart.title == title)
    return found


def numbers(chart: Chart) -> dict[str, list[str]]:
    """Return the texts of the bars by their minutes, and the unknown minutes."""
    found: dict[str, list[str]] = {}
    for bar in (*chart.bars, *chart.gaps):
        minute, _, text = bar.text.partition(": ")
        found.setdefault(minute, []).append(text)
    return found


def known(chart: Chart) -> dict[str, list[str]]:
    return {minute: texts for minute, texts in numbers(chart).items() if texts != ["unknown"]}


def test_counters_of_a_minute_are_added_up() -> None:
    chart = named("Locks taken", [sample(65, acquired_=2), sample(35, acquired_=3), sample(5, acquired_=4)])
    assert (chart.total, chart.top) == (9, 5)
    bars = {bar.text: (bar.x, bar.y, bar.height) for bar in chart.bars}
    assert bars == {"15:28: 5": (WIDTH - 20, 0, HEIGHT), "15:29: 4": (WIDTH - 10, 20, 80)}


def test_waiting_calls_of_a_minute_are_the_most_at_once() -> None:
    chart = named("Waiting calls, most at once", [sample(25, waiting=7), sample(5, waiting=2)])
    assert (chart.total, chart.top) == (7, 7)
    assert numbers(chart)["15:29"] == ["7"]


def test_conflicts_are_stacked_by_outcome_with_a_legend() -> None:
    chart = named("Conflicts", [sample(5, conflicts_skipped=6, conflicts_queued=2, conflicts_of_the_future=1)])
    assert chart.legend == {"of_the_future": 1, "skipped": 6, "queued": 2}
    assert [bar.text for bar in chart.bars] == ["15:29: 1 of_the_future", "15:29: 6 skipped", "15:29: 2 queued"]
    assert chart.bars[-1].y == pytest.approx(0)
    assert sum(bar.height for bar in chart.bars) == pytest.approx(HEIGHT)


def test_chart_of_a_task_has_only_its_numbers() -> None:
    assert named("Locks taken", [sample(5, acquired_=4)], "pay").total == 4
    assert named("Locks taken", [sample(5, acquired_=4)], "other").total == 0
    assert named("Waiting calls, most at once", [sample(5, waiting=4)], "other").total == 0


def test_minutes_without_a_sample_are_gaps() -> None:
    chart = named("Locks taken", [sample(1805, acquired_=1), sample(5, acquired_=1)])
    assert chart.total == 2
    assert len(chart.gaps) == 58
    assert numbers(chart)["15:28"] == ["unknown"]
    assert "15:20: 1" in chart.text
    assert "15:10: unknown" in chart.text


def test_present_minute_is_no_gap_before_its_sample() -> None:
    assert len(named("Locks taken", [sample(35, acquired_=1)]).gaps) == 58
    assert len(named("Locks taken", [sample(95, acquired_=1)]).gaps) == 59


def test_rare_sample_covers_the_minutes_since_the_one_before() -> None:
    slow = [sample(185, waiting=3, acquired_=1), sample(5, since=185, waiting=4, acquired_=1)]
    assert len(named("Locks taken", slow).gaps) == 56
    assert numbers(named("Locks taken", slow))["15:29"] == ["1"]
    expected = {"15:26": ["3"], "15:27": ["4"], "15:28": ["4"], "15:29": ["4"]}
    assert known(named("Waiting calls, most at once", slow)) == expected


def test_sample_older_than_the_chart_is_not_shown() -> None:
    assert named("Locks taken", [sample(3600, acquired_=5), sample(3590, acquired_=1)]).total is None


def test_counters_are_unknown_while_no_worker_counts() -> None:
    blind = sample(5, waiting=3)._replace(counting=0)
    assert named("Lost leases", [blind]).total is None
    assert named("Waiting calls, most at once", [blind]).total == 3


def held(ago: float, acquisition: str, waiting: int = 0) -> Change:
    return Change("a", NOW - ago, "held", acquisition, f"id of {acquisition}", "w1", waiting)


def test_life_of_a_lock_shows_its_holders_and_the_time_between() -> None:
    changes = [held(7200, "x.1"), held(1800, "x.1", 2), Change("a", NOW - 1200), held(600, "y.1")]
    found = life(changes, [], NOW)
    assert [(one.change.acquisition, NOW - one.begin, one.end and NOW - one.end) for one in found.stretches] == [
        ("x.1", 7200, 1200),
        ("y.1", 600, None),
    ]
    first, second = (one.bar for one in found.stretches)
    assert (first.x, first.width) == (0, pytest.approx(WIDTH - 206))  # half a minute of the last bar is to come
    assert (second.x + second.width, second.width) == (pytest.approx(WIDTH - 6), pytest.approx(99))
    assert second.text == "15:19 to now: w1"


def test_life_of_a_lock_counts_its_waiters_in_sampled_minutes() -> None:
    changes = [held(600, "x.1", 1), held(95, "x.1", 3), held(35, "x.1", 2)]
    found = life(changes, [sample(95), sample(65)], NOW)
    assert known(found.waiters) == {"15:27": ["3"], "15:28": ["3"], "15:29": ["2"]}


def test_free_lock_that_no_sample_saw_has_an_empty_life() -> None:
    found = life([Change("a", NOW)], [sample(5)], NOW)
    assert (found.stretches, found.waiters.total, found.waiters.bars) == ([], 0, [])


def test_holders_of_a_lock_have_kinds_of_their_own_by_worker_and_state() -> None:
    granted = Change("a", NOW - 300, "granted", "z.1")
    changes = [held(900, "x.1"), held(600, "y.1")._replace(by="w2"), granted, held(100, "z.2")]
    found = life(changes, [], NOW)
    assert [one.bar.kind for one in found.stretches] == ["holder0", "holder1", "holder2", "holder0"]
    assert found.legend == {"holder0": "w1", "holder1": "w2", "holder2": "granted"}


def test_holders_above_the_number_of_colours_share_one() -> None:
    changes = [held(900 - 10 * number, f"{number}.1")._replace(by=f"w{number}") for number in range(9)]
    assert life(changes, [], NOW).legend["holder0"] == "w0, w8"
