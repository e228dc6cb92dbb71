"""The entry point of the measured worker: ``-A benchmarks.handoff_app``. Stamps its steps for the profile."""

import os

from benchmarks.handoff_profile import stamp_steps
from benchmarks.handoff_tasks import app, note

__all__ = ["app"]

if os.environ.get("DLOCK_BENCH_PROFILE"):
    stamp_steps(note)
