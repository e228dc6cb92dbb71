"""Was the promise kept? Each overlap, each lost and each doubled message needs a fault that explains it."""

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from chaos.ends import Trail
from chaos.explanations import why_doubled, why_lost, why_overlapping
from chaos.resource import LIMIT
from chaos.run import Record
from chaos.schedule import TTL
from chaos.timeline import NEVER, Run, Story

#: Seconds within which a key has to be free after this kind of death; of the others, a lease (and a look at it).
CHILD_BOUND = 1.0
KINDS_OF_CHILD = ("kill child", "exit in body")
#: The task with `debounce`, and the two seconds of its `debounce`.
DEBOUNCES, DEBOUNCE, DEBOUNCE_MAX = "chaos.debounces", 0.5, 2.0


@dataclass
class Findings:
    """The results of a run. `broken` is empty if every promise was kept."""

    executions: int = 0
    hows: Counter[str] = field(default_factory=Counter)
    overlaps: Counter[str] = field(default_factory=Counter)
    #: Writes of late holders that the resource refused, and those of an older token that it let through.
    refused: int = 0
    fenced_overlaps: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    doubled: Counter[str] = field(default_factory=Counter)
    #: Calls that a newer one replaced, and those of them that had ended before.
    replaced: int = 0
    replaced_after: Counter[str] = field(default_factory=Counter)
    still: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def judge(record: Record) -> Findings:
    """Check the record of a run."""
    story = Story.of(record.events)
    found = check(
        story, record.landed, record.ends, record.waiting, record.trails, TTL, record.overwritten, record.never_recorded
    )
    found.broken += too_late(record.freed, TTL)
    found.broken += [f"a lock was never released: {lock}" for lock in record.locks_left]
    return found


def check(
    story: Story,
    landed: list[tuple[str, int, str]],
    ends: dict[str, str],
    waiting: dict[str, str],
    trails: dict[str, Trail],
    ttl: float,
    overwritten: dict[str, str] | None = None,
    never_recorded: Collection[str] = (),
) -> Findings:
    """Compare a history with what was promised.

    Args:
        story: What happened.
        landed: Writes in the order in which the resource took them: name, token, task.
        ends: The stored end of each message that has one.
        waiting: Where a message without an end is.
        trails: What the workers' logs say of each message.
        ttl: Of a lease, in seconds.
        overwritten: The last stored end of each message that had another end before.
        never_recorded: Messages that a worker took from the broker and did not record there.
    """
    found = Findings(executions=len(story.runs), hows=Counter(run.how for run in story.runs))
    found.refused = sum(run.refused for run in story.runs)
    _overlaps(story, ttl, found)
    _tokens(story, landed, found)
    _seats(story, found)
    _lost(story, ends, waiting, trails, never_recorded, found)
    _doubled(story, found)
    _debounced(story, ends, overwritten or {}, found)
    _stopped(story, ends, found)
    return found


def _overlaps(story: Story, ttl: float, found: Findings) -> None:
    inside: dict[str, list[Run]] = {}
    for run in story.runs:
        here = inside.setdefault(run.name, [])
        here[:] = [other for other in here if other.end > run.start]
        for other in here:
            earlier, later = sorted((other, run), key=lambda one: one.token)
            why, kept = why_overlapping(earlier, later, story.windows, ttl)
            found.overlaps[why] += 1
            if not kept:
                found.broken.append(f"overlap, {why}: {earlier} and {later}")
            if why != "data lost" and any(asked > later.start for asked in earlier.ensured):
                found.broken.append(f"ensure() passed although another was inside: {earlier} and {later}")
        here.append(run)


def _seats(story: Story, found: Findings) -> None:
    """Each seat is judged as a name of its own, so N seats mean at most N bodies. No body may have another seat."""
    for run in story.runs:
        _, sign, seat = run.name.partition("/")
        if sign and not 0 <= int(seat) < LIMIT:
            found.broken.append(f"a seat that the limit of {LIMIT} does not have: {run}")


def _tokens(story: Story, landed: list[tuple[str, int, str]], found: Findings) -> None:
    newest: dict[str, int] = {}
    for name, token, task in landed:
        if token < newest.get(name, 0):
            found.fenced_overlaps += 1
            found.broken.append(f"a write with token {token} of {task} landed on {name} after {newest[name]}")
        newest[name] = max(token, newest.get(name, 0))
    for (name, token), times in Counter((run.name, run.token) for run in story.runs).items():
        if times > 1:
            found.broken.append(f"token {token} of {name} was given {times} times")


def _lost(
    story: Story,
    ends: dict[str, str],
    waiting: dict[str, str],
    trails: dict[str, Trail],
    never_recorded: Collection[str],
    found: Findings,
) -> None:
    done = {run.id for run in story.runs if run.how == "return"}
    for task_id, sent in story.sent.items():
        if end := ends.get(task_id):
            if end.startswith("FAILURE") and not _fair(end, story, task_id):
                found.broken.append(f"{sent.task} {task_id} ended {end}")
        elif task_id in done:
            continue  # its end was not stored any more; that is no loss of work
        elif place := waiting.get(task_id):
            found.still[place] += 1
        else:
            trail = trails.get(task_id, [])
            runs = [run for run in story.runs if run.id == task_id]
            why = why_lost(sent, trail, runs, story.windows, recorded=task_id not in never_recorded)
            found.lost[why or "unexplained"] += 1
            if not why:
                found.broken.append(f"lost: {sent.task} {task_id}, {trail}")


def _fair(end: str, story: Story, task_id: str) -> bool:
    """A message that was acknowledged at its start fails where its process dies."""
    return end == "FAILURE WorkerLostError" and story.sent[task_id].task.endswith("_early")


def _doubled(story: Story, found: Findings) -> None:
    whole: dict[str, list[Run]] = {}
    for run in story.runs:
        if run.how == "return":
            whole.setdefault(run.id, []).append(run)
    for runs in whole.values():
        for first, second in itertools.pairwise(runs):
            why = why_doubled(first, second.start, story.acked(first, second.start), story.windows)
            found.doubled[why or "unexplained"] += 1
            if not why:
                found.broken.append(f"done twice: {first} and {second}")


def _debounced(story: Story, ends: dict[str, str], overwritten: dict[str, str], found: Findings) -> None:
    """No debounced call starts before its time, and a call that was replaced by a newer one does not run."""
    sent = {task_id for task_id, message in story.sent.items() if message.task == DEBOUNCES}
    replaced = {task_id for task_id in sent if "REVOKED" in (ends.get(task_id), overwritten.get(task_id))}
    found.replaced = len(replaced)
    for run in story.runs:
        if run.id not in sent:
            continue
        waited = run.start - story.sent[run.id].began
        if waited < DEBOUNCE and run.start - _first_of_burst(story, run.id, replaced) < DEBOUNCE_MAX:
            found.broken.append(f"a debounced call started {waited:.2f} s after it was sent, which is too early: {run}")
        if run.id in replaced and run.how == "return":
            why = why_doubled(run, NEVER, story.acked(run, NEVER), story.windows)
            found.replaced_after[why or "unexplained"] += 1
            if not why:
                found.broken.append(f"done and replaced by a newer call: {run}")


def _first_of_burst(story: Story, task_id: str, replaced: set[str]) -> float:
    """Return when the first of the calls was sent that replaced one another up to this one."""
    last = story.sent[task_id]
    earlier = [
        (message.began, one)
        for one, message in story.sent.items()
        if (message.task, message.name) == (DEBOUNCES, last.name) and message.began < last.began
    ]
    first = last.began
    for began, _ in itertools.takewhile(lambda call: call[1] in replaced, sorted(earlier, reverse=True)):
        first = began
    return first


def _stopped(story: Story, ends: dict[str, str], found: Findings) -> None:
    """A call whose body a newer one stopped ends REVOKED, unless another delivery of it ended by itself."""
    done = {run.id for run in story.runs if run.how == "return"}
    for run in story.runs:
        end = ends.get(run.id, "REVOKED")
        if run.how in ("Replaced", "killed") and run.id not in done and end != "REVOKED":
            found.broken.append(f"a newer call stopped {run}, and it ended {end}")


def too_late(freed: dict[str, list[float]], ttl: float) -> list[str]:
    """Keys that were free too late after a death."""
    late = []
    for kind, seconds in freed.items():
        bound = CHILD_BOUND if kind in KINDS_OF_CHILD else ttl + 0.1
        late += [f"a key was free {took:.2f} s after {kind!r} (at most {bound})" for took in seconds if took > bound]
    return late
