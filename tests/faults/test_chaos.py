"""A short run of `make chaos`, and the same machine without renewals, which the checker has to catch."""

import pytest

from chaos.checker import judge
from chaos.report import report
from chaos.run import Settings, run

SEED = 4


STORES = [
    "redis",
    pytest.param("postgresql", marks=pytest.mark.servers),
    pytest.param("mysql", marks=pytest.mark.servers),
]


@pytest.mark.parametrize("seconds", [10, pytest.param(45, marks=pytest.mark.slow)])
@pytest.mark.parametrize("store", STORES)
def test_random_faults_break_no_promise(tmp_path, store, seconds):
    record = run(Settings(SEED, seconds=seconds, rate=5.0, drain=45, store=store), tmp_path)
    found = judge(record)
    assert found.broken == [], report(record, found)
    # ... and it was a run worth its name, also on a busy machine.
    assert record.faults.total() >= 0.4 * seconds, report(record, found)
    assert found.executions >= 0.8 * seconds, report(record, found)
    assert found.fenced_overlaps == 0


@pytest.mark.parametrize("store", STORES)
def test_checker_without_renewals_finds_unexplained_overlaps(tmp_path, store):
    """The resource refuses the late writes."""
    pools = (("prefork", 4),)
    settings = Settings(SEED, seconds=8, names=4, kinds=[], renewal=False, drain=20, pools=pools, store=store)
    found = judge(run(settings, tmp_path))
    assert found.overlaps["no fault"] >= 1
    assert found.refused >= 1
    assert found.fenced_overlaps == 0
