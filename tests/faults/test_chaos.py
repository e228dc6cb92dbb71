"""A short run of `make chaos`, and the same machine without renewals, which the checker has to catch."""

import pytest

from chaos.checker import judge
from chaos.report import report
from chaos.run import Settings, run

SEED = 4


@pytest.mark.parametrize("seconds", [10, pytest.param(45, marks=pytest.mark.slow)])
def test_random_faults_break_no_promise(tmp_path, seconds):
    record = run(Settings(SEED, seconds=seconds, rate=5.0, drain=45), tmp_path)
    found = judge(record)
    assert found.broken == [], report(record, found)
    # ... and it was a run worth its name, also on a busy machine.
    assert record.faults.total() >= 0.4 * seconds, report(record, found)
    assert found.executions >= 0.8 * seconds, report(record, found)
    assert found.fenced_overlaps == 0


def test_checker_without_renewals_finds_unexplained_overlaps(
    tmp_path,
):
    """The resource refuses the late writes."""
    settings = Settings(SEED, seconds=8, names=4, kinds=[], renewal=False, drain=20, pools=(("prefork", 4),))
    found = judge(run(settings, tmp_path))
    assert found.overlaps["no fault"] >= 1
    assert found.refused >= 1
    assert found.fenced_overlaps == 0
