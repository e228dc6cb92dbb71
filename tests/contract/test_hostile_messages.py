"""Whatever a publisher writes into a message ends with that message: no worker ends, and other messages run."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from tests.support.processes import ROOT


@pytest.mark.invariant("hostile-messages-end-alone")
@pytest.mark.core
@pytest.mark.parametrize(
    ("messages", "every"),
    [
        pytest.param(1_500, 4, id="short"),
        pytest.param(200_000, 5, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_random_messages_end_no_worker(lock_url: str, messages: int, every: int) -> None:
    """Every nth of those that reach the pool is run as well; the others are pickled for it."""
    seed = os.environ.get("DLOCK_TEST_SEED") or str(random.SystemRandom().randrange(2**32))
    command = [sys.executable, "-m", "tests.contract.hostile", lock_url, str(messages), str(every), seed]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.returncode == 0, f"DLOCK_TEST_SEED={seed}\n{ended.stderr[-6000:]}"
