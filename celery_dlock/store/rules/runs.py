"""Run marks (``once_per``) and done marks."""

from __future__ import annotations

import dataclasses

from ..base import ReleaseRequest
from ..operator_model import RunView
from . import views
from .data import Mark, RunMark, Settlement
from .records import DONE_MS, TOMBSTONE_MS, Records

__all__ = [
    "forget_run",
    "last_run",
    "mark_and_holder",
    "mark_done",
    "put_run_back",
    "resolve_run",
    "save_run_mark",
    "settle_run",
]


def last_run(records: Records, name: str, tick: str) -> RunView | None:
    """Return the last run of a name, or of one of its ticks."""
    return views.run_view(name, tick, *mark_and_holder(records, tick))


def mark_and_holder(records: Records, tick: str) -> tuple[RunMark, int, str]:
    """Return the mark of the last run, the milliseconds until it expires, and the acquisition that holds the lock."""
    lock = records.lock()
    return RunMark.of(records.mark("run", tick)), records.mark_left_ms("run", tick), lock.acquisition if lock else ""


def forget_run(records: Records, tick: str, command_id: str, shown_mark: str) -> bool:
    """Forget a name's last run. A body that runs now goes on, and its success is remembered again."""
    mark = RunMark.of(records.mark("run", tick))
    if mark.acquisition == command_id:
        return True
    if shown_mark and shown_mark != mark.shown:
        return False
    if not mark.at or (mark.state == "cleared" and not mark.seed):
        return False
    records.put_mark("run", tick, RunMark("cleared", mark.at, acquisition=command_id).text, TOMBSTONE_MS)
    return True


def resolve_run(records: Records, tick: str, command_id: str, shown_mark: str, *, sent: bool, window_ms: int) -> bool:
    """Set the outcome of a run whose outcome is unknown."""
    mark, lock = RunMark.of(records.mark("run", tick)), records.lock()
    if mark.acquisition == command_id:
        return True
    if shown_mark and shown_mark != mark.shown:
        return False
    crashed = mark.state == "started" and (lock is None or lock.acquisition != mark.acquisition)
    if mark.state != "unknown" and not crashed:
        return False
    state = "used" if sent else "cleared"
    settled = RunMark(state, mark.at, mark.identity, command_id, mark.seed, mark.by)
    records.put_mark("run", tick, settled.text, window_ms)
    return True


def save_run_mark(records: Records, acquisition: str, ending: ReleaseRequest) -> None:
    """Set the mark of a run that ends."""
    if ending.used_ms:
        records.put_mark("run", ending.tick, _used(records, acquisition, ending).text, ending.used_ms)
        return
    seed_ms = ending.window_ms if ending.once else 0
    mark = RunMark.of(records.mark("run", ending.tick))
    if mark.state == "settled" and mark.acquisition == acquisition:
        if ending.final:  # its end is stored, whatever it is
            used = dataclasses.replace(mark, state="used")
            records.put_mark("run", ending.tick, used.text, records.mark_left_ms("run", ending.tick))
        return
    if not seed_ms or mark.state != "started" or mark.acquisition != acquisition:
        return
    ended = RunMark("cleared", mark.at, mark.identity, "", mark.seed, mark.by)
    if mark.crashed_at:
        # This run did not succeed, so the outcome of the crashed run before it is still unknown.
        ended = RunMark("unknown", mark.crashed_at, mark.crashed_of, "", mark.seed, mark.crashed_by)
    records.put_mark("run", ending.tick, ended.text, seed_ms)


def settle_run(records: Records, acquisition: str, ending: ReleaseRequest) -> Settlement | None:
    """Prepare the run mark that a transaction of the user writes. Return None if the run has no run mark.

    Until the transaction commits, the run counts as one that did not succeed. If its process dies, the mark is rolled
    back with the rows, so the outcome is known.
    """
    if not ending.used_ms:
        return None
    before = records.mark("run", ending.tick) or ""
    save_run_mark(records, acquisition, ending._replace(used_ms=0))
    after = records.mark("run", ending.tick) or ""
    used = dataclasses.replace(_used(records, acquisition, ending), state="settled")
    return Settlement(ending.tick, Mark(used.text, records.now + ending.used_ms * 1000), before, after)


def put_run_back(records: Records, settled: Settlement) -> None:
    """Undo :func:`settle_run`, because the transaction was not guarded: a death of the process is unknown again."""
    if settled.before != settled.after == records.mark("run", settled.tick):
        records.put_mark("run", settled.tick, settled.before, records.mark_left_ms("run", settled.tick))


def _used(records: Records, acquisition: str, ending: ReleaseRequest) -> RunMark:
    return RunMark("used", str(records.now), ending.identity, acquisition, ending.seed, ending.requester)


def mark_done(records: Records, identity: str, owner: str, age_us: int) -> None:
    """Set the done mark of a message whose release did not set it."""
    started, lock = records.now - age_us, records.lock()
    of_that_run = lock is not None and lock.acquisition.startswith(f"{owner}.")
    if lock is not None and lock.identity == identity and not of_that_run and lock.since > started:
        return
    if records.mark("done", identity) is None:
        records.put_mark("done", identity, str(started), DONE_MS)
