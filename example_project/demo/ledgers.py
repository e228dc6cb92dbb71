"""The ledgers at the end of the demo, compared with the published entries: a row per account."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from example_project.demo.verdict import Evidence, Line, inside

TASK = "shop.post_entry"


@dataclass(frozen=True, slots=True)
class LedgerRow:
    account: str
    published: int = 0
    posted: int = 0
    out_of_order: int = 0
    lost: int = 0
    posted_twice: int = 0
    wrong_balance: int = 0
    sent_back: int = 0  # entries in the killed worker's hands


def ledger_rows(evidence: Evidence) -> list[LedgerRow]:
    """Return a row per account. The amount of an account's n-th entry is n."""
    published: dict[str, list[str]] = {}
    for fact in evidence.of("publish"):
        if fact.task == TASK:
            published.setdefault(fact.subject, []).append(fact.task_id)
    found, sent_back = evidence.ledgers, in_killed_hands(evidence)
    rows = []
    for account, ids in sorted(published.items()):
        late = sent_back | on_their_way(evidence, account, ids)
        rows.append(_row(account, ids, found.get(account, ()), sent_back, late))
    return rows


def in_killed_hands(evidence: Evidence) -> set[str]:
    """Return the ids of messages that a killed worker had received and not finished: the broker delivers them again."""
    held = Counter[str]()
    for fact in evidence.facts:
        if fact.pid in evidence.killed:
            held[fact.task_id] += {"receive": 1, "part": -1}.get(fact.what, 0)
    return {task_id for task_id, times in held.items() if times > 0}


def on_their_way(evidence: Evidence, account: str, ids: Sequence[str]) -> set[str]:
    """Return the account's next entry at the time of a kill, if no body was posting one.

    Its message may have been on its way to the killed worker. A message that a worker takes from a Redis broker while
    it dies is delivered late, after its grant has timed out.
    """
    bodies = [fact for fact in evidence.facts if fact.task == TASK and fact.subject == account and fact.run]
    found = set()
    for moment in {evidence.killed[fact.pid] for fact in evidence.facts if fact.pid in evidence.killed}:
        before = [fact for fact in bodies if fact.at <= moment]
        if not inside(before, {}):
            entered = {fact.task_id for fact in before}
            found |= set([task_id for task_id in ids if task_id not in entered][:1])
    return found


def _row(
    account: str, ids: Sequence[str], lines: Sequence[Line], sent_back: set[str], may_be_late: set[str]
) -> LedgerRow:
    posted = Counter(line.amount for line in lines)
    return LedgerRow(
        account,
        len(ids),
        len(posted),
        sum(1 for amount in _late(lines) if ids[amount - 1] not in may_be_late),
        sum(1 for amount in range(1, len(ids) + 1) if not posted[amount]),
        sum(times - 1 for amount, times in posted.items() if ids[amount - 1] not in sent_back),
        sum(1 for line, before in zip(lines, (0, *(line.balance for line in lines)), strict=False)
            if line.balance != before + line.amount),
        sum(1 for task_id in ids if task_id in sent_back),
    )  # fmt: skip


def _late(lines: Sequence[Line]) -> Iterator[int]:
    """Yield the entries that were posted after a younger one."""
    youngest = 0
    for line in lines:
        if line.amount < youngest:
            yield line.amount
        youngest = max(youngest, line.amount)


def total(rows: Sequence[LedgerRow]) -> LedgerRow:
    figures = zip(*((r.published, r.posted, r.out_of_order, r.lost, r.posted_twice, r.wrong_balance, r.sent_back)
                    for r in rows), strict=True)  # fmt: skip
    return LedgerRow("all", *map(sum, figures))
