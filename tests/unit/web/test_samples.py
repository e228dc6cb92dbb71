"""The samples of the last hour: what they count, what they remember of a lock, and when they are taken."""

from collections.abc import Callable
from typing import Any

import pytest

from celery_dlock.control import Counts, HolderView, LockView, Workers, WorkerView
from celery_dlock.errors import StoreUnavailable
from celery_dlock.web import samples as module
from celery_dlock.web.samples import HOUR, Sampler, Samples
from tests.support.polling import eventually

NOW = 1_800_000_000.0
NOTHING = Counts({}, {}, {}, {}, {}, {}, {}, {})


def counts(**waiting: int) -> Counts:
    return Counts({}, waiting, {}, {}, {}, {}, {}, {})


def held(name: str, acquisition: str, *, since: float, at: float, waiting: int = 0) -> LockView:
    """Return the view of a held lock. Its times are by the store's clock, which is an hour ahead."""
    holder = HolderView("held", acquisition, "pay", f"id of {acquisition}", "w1", 7, since + 3600, 9.0, 10.0, 1)
    return LockView(name, ("held",), holder, None, None, waiting, has_dead_letters=False, at=at + 3600)


def told(taken: int, *, node: str = "w1", pid: int = 7) -> WorkerView:
    return WorkerView(node, pid=pid, counters={"acquired": {"pay": {"": taken}}})


def growth(samples: Samples, *views: WorkerView, after: float) -> int:
    """Add a sample of these answers. Return the locks that it counts as taken since the one before."""
    samples.add(NOW + after - 30, NOW + after, NOTHING, {}, Workers(views))
    return samples.hour()[-1].counted["acquired", "pay", ""]


def see(samples: Samples, after: float, *views: LockView) -> None:
    samples.add(NOW + after - 30, NOW + after, NOTHING, {view.name: view for view in views}, None)


def test_sample_counts_what_a_worker_counted_since_its_last_answer() -> None:
    samples = Samples()
    assert growth(samples, told(100), after=0) == 0  # before the dashboard's first sample
    assert growth(samples, told(103), after=30) == 3
    assert growth(samples, after=60) == 0  # it did not answer in time
    assert growth(samples, told(110), told(50, node="w2"), after=90) == 7
    assert growth(samples, told(111), told(52, node="w2"), after=120) == 3


def test_worker_that_restarted_is_counted_from_0() -> None:
    samples = Samples()
    growth(samples, told(100), after=0)
    assert growth(samples, told(4, pid=8), after=30) == 4
    assert growth(samples, told(5, pid=8), after=60) == 1


def test_samples_and_workers_older_than_an_hour_are_forgotten() -> None:
    samples = Samples()
    growth(samples, told(1), after=0)
    growth(samples, after=HOUR)
    assert len(samples.hour()) == 2
    growth(samples, after=HOUR + 1)
    assert [sample.at for sample in samples.hour()] == [NOW + HOUR, NOW + HOUR + 1]
    assert growth(samples, told(9), after=HOUR + 30) == 0


def test_changes_of_a_lock_name_each_holder_from_its_acquisition() -> None:
    samples = Samples()
    see(samples, 0, held("a", "x.1", since=NOW - 50, at=NOW), held("b", "z.1", since=NOW, at=NOW))
    see(samples, 30, held("a", "x.1", since=NOW - 50, at=NOW + 30))
    see(samples, 60, held("a", "x.1", since=NOW - 50, at=NOW + 60, waiting=2))
    see(samples, 90, held("a", "y.1", since=NOW + 75, at=NOW + 90, waiting=2))
    see(samples, 120)
    found = [(one.at - NOW, one.state, one.acquisition, one.waiting) for one in samples.changes("a")]
    assert found == [
        (-50, "held", "x.1", 0),
        (60, "held", "x.1", 2),
        (75, "held", "y.1", 2),
        (120, "", "", 0),
    ]


def test_present_state_of_a_lock_follows_its_sampled_changes() -> None:
    samples = Samples()
    see(samples, 0, held("a", "x.1", since=NOW - 50, at=NOW))
    same = held("a", "x.1", since=NOW - 50, at=NOW + 9)
    assert samples.changes("a", same, NOW + 9) == samples.changes("a")
    new = held("a", "y.1", since=NOW + 5, at=NOW + 9)
    assert [one.at - NOW for one in samples.changes("a", new, NOW + 9)] == [-50, 5]
    assert len(samples.changes("a")) == 1  # a page changes no sample


def test_memory_of_locks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCKS", 3)
    monkeypatch.setattr(module, "CHANGES", 6)
    samples = Samples()
    views = [held(f"n{number}", "x.1", since=NOW, at=NOW) for number in range(9)]
    see(samples, 0, *views)
    assert [bool(samples.changes(view.name)) for view in views] == [True] * 3 + [False] * 6
    for after in range(30, 300, 30):
        changing = held("n1", f"{after}.1", since=NOW + after, at=NOW + after)
        see(samples, after, views[0], changing)
    assert len(samples.changes("n1")) == 6
    assert [one.acquisition for one in samples.changes("n0")] == ["x.1"]  # it is still held


class Store:
    """The part of a LockControl that is sampled."""

    def __init__(self) -> None:
        self.asked = 0
        self.broken = False

    def counts(self, each: Callable[[LockView], object]) -> Counts:
        self.asked += 1
        if self.broken:
            raise StoreUnavailable("down")
        each(held("a", "x.1", since=NOW, at=NOW))
        return counts(pay=2)


def sampler_of(store: Any, answers: Workers | None = None, **facts: Any) -> Sampler:
    return Sampler(store, lambda _within: answers, **facts)


def test_nothing_is_asked_until_a_page_is_opened_and_then_again_and_again() -> None:
    store = Store()
    sampler = sampler_of(store, period=0.01)
    assert store.asked == 0
    sampler.opened()
    eventually(lambda: store.asked >= 3)
    assert sampler.samples.hour()[0].waiting == {"pay": 2}
    assert sampler.samples.changes("a")


@pytest.mark.parametrize(("always", "delay"), [(False, None), (True, 30.0)])
def test_sampling_ends_an_hour_after_the_last_page_unless_it_is_wanted_always(
    monkeypatch: pytest.MonkeyPatch, always: bool, delay: float | None
) -> None:
    store = Store()
    sampler = sampler_of(store)
    assert sampler.sample() == 30.0
    monkeypatch.setattr(sampler, "_opened", sampler._opened - HOUR)
    monkeypatch.setattr(sampler, "_always", always)
    assert sampler.sample() == delay
    assert store.asked == (2 if always else 1)


def test_store_that_takes_long_is_sampled_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 4.0])
    sampler = sampler_of(Store())
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    assert sampler.sample() == 80.0


def test_store_that_does_not_answer_leaves_a_gap_between_samples() -> None:
    store = Store()
    sampler = sampler_of(store)
    sampler.sample()
    store.broken = True
    sampler.sample()
    sampler.sample()
    store.broken = False
    sampler.sample()
    first, second = sampler.samples.hour()
    assert first.at < second.since <= second.at


def test_sampler_of_a_dashboard_that_is_gone_ends() -> None:
    store = Store()
    sampler = sampler_of(store, period=0.01)
    sampler.opened()
    loop = sampler._loop
    eventually(lambda: store.asked)
    assert loop.running.locked()
    del sampler
    eventually(lambda: not loop.running.locked())
