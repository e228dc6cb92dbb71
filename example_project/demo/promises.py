"""The promises that the demo checks. Each one yields what broke it, from the evidence."""

from collections import Counter
from collections.abc import Callable, Iterator

from example_project.demo.ledgers import ledger_rows
from example_project.demo.verdict import FREE_WITHIN, Evidence, overlaps, rows, tick_past_ttl

Promise = Callable[[Evidence], Iterator[str]]

_NEVER_SKIPPED = {"shop.rebuild_index": "retry", "shop.post_entry": "queue"}


def one_at_a_time(evidence: Evidence) -> Iterator[str]:
    """At most one execution per lock name is in its body."""
    yield from map(str, overlaps(evidence.facts, evidence.killed))


def sent_once(evidence: Evidence) -> Iterator[str]:
    """once_per: a send that arrived is not sent again."""
    for task, received in evidence.received.items():
        yield from (f"{task} {sent} arrived {times} times" for sent, times in received.items() if times > 1)


def crashes_send_nothing_twice(evidence: Evidence) -> Iterator[str]:
    """after_crash: a killed send has an unknown outcome, and is not sent again."""
    # The promise before counts arrivals. This one checks that a killed send had arrived and was published again.
    for task in evidence.received:
        killed = {fact.subject for fact in evidence.of("enter") if fact.task == task and fact.pid in evidence.killed}
        if not any(evidence.received[task].get(subject) for subject in killed):
            yield f"{task}: no send was killed after it had arrived, so nothing was proven"
    for row in rows(evidence):
        if row.task == "shop.send_receipt" and not row.held:
            yield f"{row.task}: no call was held back while the outcome was unknown"
        if row.task == "shop.send_sms" and not row.recognised:
            yield f"{row.task}: the gateway did not get the key of the killed send again"


def reported_once(evidence: Evidence) -> Iterator[str]:
    """once_per="tick": each night has one report, however many beats there are."""
    nights = Counter(fact.tick for fact in evidence.of("enter") if fact.task == "shop.nightly_report")
    for night, times in nights.items():
        if not night:
            yield f"{times} reports were published without a night, so not by a beat with ticks"
        elif times > 1:
            yield f"the night of {night} has {times} reports"


def nothing_lost(evidence: Evidence) -> Iterator[str]:
    """A conflict never loses a task, and never hangs a result."""
    ran = {(fact.task, fact.subject) for fact in evidence.of("enter")}
    for fact in evidence.of("publish"):
        state = evidence.states.get(fact.task_id, "PENDING")
        what = f"{fact.task} {fact.subject}".rstrip()
        if state not in {"SUCCESS", "REVOKED", "FAILURE"}:
            yield f"{what} has no end: {state}"
        elif state == "REVOKED" and fact.task in _NEVER_SKIPPED:
            yield f"{what} was skipped, and its policy is {_NEVER_SKIPPED[fact.task]}"
        elif (fact.task, fact.subject) not in ran:
            yield f"{what} never ran"
    for task, received in evidence.received.items():
        asked = {fact.subject for fact in evidence.of("publish") if fact.task == task}
        yield from (f"{task} {subject} never arrived" for subject in sorted(asked) if not received.get(subject))


def renewed(evidence: Evidence) -> Iterator[str]:
    """A lock is held as long as its body runs, far past its ttl."""
    # The first promise checks that no other body entered. This one checks that another call tried to.
    if not tick_past_ttl(evidence.facts):
        yield "no tick came while a report was past its ttl, so nothing was proven"


def freed_at_once(evidence: Evidence) -> Iterator[str]:
    """The lock of a killed pool child is free within one second."""
    for task, seconds in evidence.free_after.items():
        if seconds > FREE_WITHIN:
            yield f"{task}: its lock was free after {seconds:.2f} s"


def all_ended_well(evidence: Evidence) -> Iterator[str]:
    """Only killed bodies fail, and only calls whose outcome a killed body left unknown are held."""
    killed = {fact.task_id: fact.subject for fact in evidence.of("enter") if fact.pid in evidence.killed}
    entered = {fact.task_id for fact in evidence.of("enter")}
    for fact in evidence.of("publish"):
        held = fact.task_id not in entered and fact.subject in killed.values() and fact.task == "shop.send_receipt"
        if evidence.states.get(fact.task_id) == "FAILURE" and fact.task_id not in killed and not held:
            yield f"{fact.task} {fact.subject} ({fact.task_id}) ended in FAILURE"


def posted_in_order(evidence: Evidence) -> Iterator[str]:
    """queue: an account's entries are posted in order, except those that a kill sent back."""
    for row in ledger_rows(evidence):
        if row.out_of_order:
            yield f"{row.account}: {row.out_of_order} entries were posted after a younger one"


def posted_once(evidence: Evidence) -> Iterator[str]:
    """queue: every entry is posted, and only killed ones may be posted twice."""
    for row in ledger_rows(evidence):
        if row.lost:
            yield f"{row.account}: {row.lost} of {row.published} entries are not in the ledger"
        if row.posted_twice:
            yield f"{row.account}: {row.posted_twice} entries are in the ledger twice"


def balances_right(evidence: Evidence) -> Iterator[str]:
    """Every balance builds on the one before it."""
    for row in ledger_rows(evidence):
        if row.wrong_balance:
            yield f"{row.account}: {row.wrong_balance} of {row.posted} balances are wrong"


ALL: tuple[Promise, ...] = (
    one_at_a_time,
    sent_once,
    crashes_send_nothing_twice,
    reported_once,
    nothing_lost,
    renewed,
    freed_at_once,
    all_ended_well,
    posted_in_order,
    posted_once,
    balances_right,
)


def broken(evidence: Evidence) -> Iterator[tuple[str, list[str]]]:
    """Yield each broken promise with its faults."""
    for promise in ALL:
        if faults := list(promise(evidence)):
            yield (promise.__doc__ or promise.__name__), faults
