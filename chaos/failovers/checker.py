"""The cost of the failovers of a run, and whether it is more than its settings permit."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos.failovers.run import Plan, Record
from chaos.timeline import STEP, Run, Story, Window

#: Of the leases in tests.support.apps.failovers, in seconds; its import needs servers.
TTL = 6.0


@dataclass
class Findings:
    """`broken` is empty if the promise was kept."""

    executions: int = 0
    #: Two bodies of one lock at a time: the earlier was notified before the later began, during its body, or not.
    told_before: int = 0
    told_inside: int = 0
    not_told: int = 0
    #: Among them those whose earlier process had not been scheduled.
    paused: int = 0
    #: Writes of late holders that the resource refused, and those of an older token that it let through.
    refused: int = 0
    let_through: int = 0
    lost: int = 0
    #: Messages that waited in a store that forgot them.
    lost_in_store: int = 0
    twice: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def double_grants(self) -> int:
        return self.told_before + self.told_inside + self.not_told


def judge(record: Record) -> Findings:
    story = Story.of(record.events)
    found = Findings(executions=len(story.runs), refused=sum(run.refused for run in story.runs))
    for earlier, later in _overlaps(story.runs):
        _judge_overlap(earlier, later, story, record, found)
    _tokens(record, found)
    _ends(record, story, found)
    returned = Counter(run.id for run in story.runs if run.how == "return")
    found.twice = sum(times - 1 for times in returned.values())
    return found


def _overlaps(runs: list[Run]) -> Iterator[tuple[Run, Run]]:
    inside: dict[str, list[Run]] = {}
    for run in runs:
        here = inside.setdefault(run.name, [])
        here[:] = [other for other in here if other.end > run.start]
        for other in here:
            earlier, later = sorted((other, run), key=lambda one: one.token)
            yield earlier, later
        here.append(run)


def _judge_overlap(earlier: Run, later: Run, story: Story, record: Record, found: Findings) -> None:
    told_before = earlier.told <= later.start
    found.told_before += told_before
    found.told_inside += not told_before and earlier.told <= earlier.end
    found.not_told += earlier.told > earlier.end
    paused = _paused(earlier, later, story.windows)
    found.paused += paused
    if told_before or paused:
        return
    what = f"{earlier} and {later}"
    if not _struck(earlier, later, record):
        found.broken.append(f"an overlap without a failover: {what}")
    elif not record.plan.forgets:
        found.broken.append(f"a double grant in spite of {record.plan.declared or record.plan.store}: {what}")
    if min(earlier.told, earlier.end) > later.start + TTL + STEP:
        found.broken.append(f"a holder was not notified within its ttl: {what}")


def _struck(earlier: Run, later: Run, record: Record) -> bool:
    """Did a failover lie between the two grants, or so shortly before that the first was not copied?"""
    until = max(earlier.start, later.start)
    return any(f.at - record.plan.cut - STEP <= until and f.until >= earlier.start - STEP for f in record.failovers)


def _paused(earlier: Run, later: Run, windows: list[Window]) -> bool:
    until = max(earlier.start, later.start)
    gaps = [window for window in windows if window.kind == "gap" and window.main == earlier.main]
    return sum(gap.shared(earlier.start, until) for gap in gaps) >= TTL / 2


def _tokens(record: Record, found: Findings) -> None:
    newest: dict[str, int] = {}
    for name, token, task in record.landed:
        if token < newest.get(name, 0):
            found.let_through += 1
            found.broken.append(f"a write with token {token} of {task} landed on {name} after {newest[name]}")
        newest[name] = max(token, newest.get(name, 0))


def _ends(record: Record, story: Story, found: Findings) -> None:
    done = {run.id for run in story.runs if run.how == "return"}
    for task_id, sent in story.sent.items():
        end = record.ends.get(task_id)
        if end and end.startswith("FAILURE"):
            found.broken.append(f"{sent.task} {task_id} ended {end}")
        if end or task_id in done or task_id in record.waiting:
            continue
        if _forgotten(sent.task, sent.at, record.plan, record):
            found.lost_in_store += 1
        else:
            found.lost += 1
            found.broken.append(f"lost: {sent.task} {task_id}, sent at {sent.at:.2f}")


def _forgotten(task: str, at: float, plan: Plan, record: Record) -> bool:
    """Did it wait in a store whose data a failover may lose?"""
    may_lose = plan.forgets or "dlock_durability" not in plan.declared
    return task.endswith(".queues") and may_lose and any(failover.until > at for failover in record.failovers)
