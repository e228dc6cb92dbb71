"""The evidence of the demo, and its summary: a row per task."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from example_project.demo.history import Fact

FREE_WITHIN = 1.0  # seconds from a pool child's death until its lock is free; the ttl of that task is 20 s

REPORT_TTL = 2.0  # seconds, of the nightly report, whose body takes 5


@dataclass(frozen=True, slots=True)
class Overlap:
    task: str
    subject: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.task} {self.subject}".rstrip() + f" ran twice at once for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a ledger."""

    amount: int
    balance: int


@dataclass(frozen=True, slots=True)
class Row:
    task: str
    published: int = 0
    ran: int = 0
    skipped: int = 0
    postponed: int = 0
    held: int = 0
    recognised: int = 0
    overlaps: int = 0
    sent_twice: int = 0
    free_after: float | None = None


@dataclass(slots=True)
class Evidence:
    """The records at the end of the demo. None comes from the library, except the moment of `free_after`."""

    facts: Sequence[Fact]
    states: Mapping[str, str]  # task id -> the state in the result backend
    received: Mapping[str, Mapping[str, int]]  # task -> message id -> how often it arrived
    killed: Mapping[int, float] = field(default_factory=dict)  # pid -> when
    free_after: Mapping[str, float] = field(default_factory=dict)  # task -> seconds
    ledgers: Mapping[str, Sequence[Line]] = field(default_factory=dict)  # account -> its lines
    recognised: Mapping[str, int] = field(default_factory=dict)  # task -> sends that its gateway recognised

    def of(self, what: str) -> list[Fact]:
        return [fact for fact in self.facts if fact.what == what]


def inside(facts: Iterable[Fact], killed: Mapping[int, float]) -> list[Fact]:
    """Return the entries into bodies that are running now."""
    entered = {fact.run: fact for fact in facts if fact.what in {"enter", "leave"} and fact.pid not in killed}
    return [fact for fact in entered.values() if fact.what == "enter"]


def tick_past_ttl(facts: Iterable[Fact]) -> bool:
    """Return whether a tick was delivered while a nightly report was in its body for longer than its ttl."""
    reports = [fact for fact in facts if fact.task == "shop.nightly_report"]
    ticks = [fact.at for fact in reports if fact.what == "deliver"]
    leaves = {fact.run: fact.at for fact in reports if fact.what == "leave"}
    past_ttl = [
        (fact.at + REPORT_TTL, leaves[fact.run]) for fact in reports if fact.what == "enter" and fact.run in leaves
    ]
    return any(since < tick < until for since, until in past_ttl for tick in ticks)


def overlaps(facts: Iterable[Fact], killed: Mapping[int, float]) -> list[Overlap]:
    """Return every entry into a body while another of the same task and subject was running."""
    found, until = [], defaultdict[tuple[str, str], float](lambda: -inf)
    facts = list(facts)
    leaves = {fact.run: fact.at for fact in facts if fact.what == "leave"}
    for entry in sorted((fact for fact in facts if fact.what == "enter"), key=lambda fact: fact.at):
        # A killed body has no end of its own: it ended with its process. Any other without an end is still running.
        end = leaves.get(entry.run, killed.get(entry.pid, inf))
        others_end = until[entry.task, entry.subject]
        if entry.at < others_end:
            found.append(Overlap(entry.task, entry.subject, min(end, others_end) - entry.at))
        until[entry.task, entry.subject] = max(end, others_end)
    return found


def rows(evidence: Evidence) -> list[Row]:
    published, delivered = (Counter(fact.task for fact in evidence.of(what)) for what in ("publish", "deliver"))
    # A message whose first body was killed enters a second body.
    ran = Counter(task for task, _ in {(fact.task, fact.task_id) for fact in evidence.of("enter")})
    ids = {fact.task_id: fact.task for fact in evidence.of("publish")}
    entered = {fact.task_id for fact in evidence.of("enter")}
    skipped = Counter(ids[task_id] for task_id, state in evidence.states.items() if state == "REVOKED")
    failed = Counter(
        ids[task_id] for task_id, state in evidence.states.items() if state == "FAILURE" and task_id not in entered
    )
    crossed = Counter(overlap.task for overlap in overlaps(evidence.facts, evidence.killed))
    return [
        Row(
            task,
            published[task],
            ran[task],
            skipped[task],
            # A delivery ends in a body, a skip, or an error before the body. Else its message is republished or parked.
            max(0, delivered[task] - ran[task] - skipped[task] - failed[task]),
            failed[task],
            evidence.recognised.get(task, 0),
            crossed[task],
            sum(times - 1 for times in evidence.received.get(task, {}).values()),
            evidence.free_after.get(task),
        )
        for task in sorted(published)
    ]
