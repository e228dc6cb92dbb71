"""The renewal schedule: which records of a local lease table the watchdog looks at in a round.

A process may hold thousands of leases, of which few need something at a given moment. A record is looked at:

- when its renewal is due, or its ``max_hold`` is over. A calendar gives these records;
- while its acquire or its release is under way. The lease table notes the record when either begins;
- in turn with all others. This finds what the table does not note: a doubtful delivery, or a process that Celery kills.

So a process with up to :data:`IN_TURN` leases has all of them looked at in each round.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from typing import Final

from .lease_table import LeaseRecord, LeaseState, LocalLeaseRecord, LocalLeaseTable

__all__ = ["RenewalSchedule", "renewal_due"]

#: Each round looks at IN_TURN records in turn, or at one in TURN_FRACTION if that is more. A turn takes 5 s at most.
#: A record that is opened during a turn is looked at in the next one, so after 10 s at most.
IN_TURN: Final = 100
TURN_FRACTION: Final = 25
#: Maximum renewals in a round. It bounds the time for which a round holds the interpreter. It is exceeded if a lease
#: would otherwise be renewed only after half of its ttl.
RENEWALS: Final = 1000
#: Maximum seconds from one renewal to the next, if newer calls may replace the holder.
STOP_CHECK: Final = 1.0
#: Seconds from one round to the next. A renewal is put off by a multiple of this.
PUT_OFF: Final = 0.2
#: Entries of freed records that a calendar may contain in addition to its live ones.
SPARE: Final = 1000
#: Pages of a calendar for a second.
PAGES: Final = 20

_DEADLINE: Final = operator.attrgetter("deadline")


def renewal_due(record: LeaseRecord) -> float:
    """Return the time after which a lease is to be renewed, on the monotonic clock: after a third of its ttl.

    Renewals also ask whether a newer call replaces the holder. So a lease that can be replaced is renewed sooner.
    """
    lead = record.ttl * 2 / 3
    return record.deadline - (max(lead, record.ttl - STOP_CHECK) if record.stoppable else lead)


class RenewalSchedule:
    """The schedule of one lease table. Only the watchdog's thread uses it.

    Args:
        table: The lease table of this process.
    """

    def __init__(self, table: LocalLeaseTable) -> None:
        self._table = table
        #: The records of the last look. Plan them again, because renewals have moved their deadlines since.
        self._looked: list[LocalLeaseRecord] = []
        #: The records that are still to be looked at in turn, and how many of them each round looks at.
        self._turn: list[LocalLeaseRecord] = []
        self._turn_share = IN_TURN
        #: By the time of the next look. An entry counts only if the record's ``look_at`` has come.
        self._looks = _Calendar()
        #: By deadline. A renewal does not change the entry. It is corrected when it is among the first.
        self._deadlines = _Calendar()

    def due_records(self, now: float, until: float) -> list[LocalLeaseRecord]:
        """Return the records to look at now, each once.

        Args:
            now: The time on the monotonic clock.
            until: Renewals that become due by this time are returned too.
        """
        held: list[LocalLeaseRecord] = []
        looked: list[LocalLeaseRecord] = []
        for record in [*self._looked, *self._table.changed()]:
            state = record.state  # read once: its thread may change it, and no record may be in neither list
            if state is LeaseState.HELD:
                held.append(record)
            elif state is not LeaseState.FREE:
                looked.append(record)
        self._plan(held)
        looked += self._due(now, until)
        self._looked = looked
        # Each once: a dict keeps the first of two equal keys.
        return list(dict.fromkeys(looked + self._in_turn()))

    def first_deadline(self) -> float:
        """Return the earliest deadline of the leases that are held and not lost; infinity if there is none."""
        calendar = self._deadlines
        while calendar.pages:
            number, page = calendar.first()
            record = min(page, key=_DEADLINE)
            deadline = record.deadline
            if record.state is not LeaseState.HELD or record.lost:
                calendar.replace_first(
                    [record for record in page if record.state is LeaseState.HELD and not record.lost]
                )
            elif int(deadline * PAGES) <= number:
                return deadline
            else:  # all of the page were renewed
                calendar.replace_first([])
                for record in page:
                    calendar.add(record.deadline, record)
        return math.inf

    def _plan(self, records: Sequence[LocalLeaseRecord]) -> None:
        """Plan the next look at held leases, unless an earlier look is planned, which will plan the next."""
        add = self._looks.add
        for record in records:
            at = renewal_due(record)
            if 0 < record.max_hold_until < at:
                at = record.max_hold_until
            if at < record.look_at:
                record.look_at = at
                add(at, record)
                if not record.has_deadline_entry:
                    record.has_deadline_entry = True
                    self._deadlines.add(record.deadline, record)

    def _due(self, now: float, until: float) -> list[LocalLeaseRecord]:
        due = self._looks.take(until)
        if len(due) > RENEWALS:
            due = self._spread(due, now)
        for record in due:
            record.put_off = False
        return due

    def _spread(self, due: list[LocalLeaseRecord], now: float) -> list[LocalLeaseRecord]:
        """Put renewals off to the next rounds, such that each lease is still renewed in the first half of its ttl.

        Return the records that are not put off. No renewal is put off twice: otherwise too many would be due in the
        last round.
        """
        again = [record for record in due if record.put_off]
        due = [record for record in due if not record.put_off]
        due.sort(key=_latest)
        share = RENEWALS
        for number, record in enumerate(due, 1):
            rounds = max(1, int((_latest(record) - now) / PUT_OFF))
            share = max(share, -(-number // rounds))
        for number in range(share, len(due)):
            record = due[number]
            record.put_off = True
            record.look_at = min(_latest(record), now + PUT_OFF * (number // share))
            self._looks.add(record.look_at, record)
        return again + due[:share]

    def _in_turn(self) -> list[LocalLeaseRecord]:
        if not self._turn:
            self._drop_freed()
            self._turn = self._table.records()
            self._turn.reverse()  # taken from the end, the oldest first
            # Fixed for the turn. If leases are released, their records stay in the turn, and must not make it longer.
            self._turn_share = max(IN_TURN, -(-len(self._turn) // TURN_FRACTION))
        count = self._turn_share
        turn = [record for record in self._turn[: -count - 1 : -1] if record.state is not LeaseState.FREE]
        del self._turn[-count:]
        self._plan([record for record in turn if record.state is LeaseState.HELD])
        return turn

    def _drop_freed(self) -> None:
        """Drop entries of records that are free: short tasks with a long ttl leave many of them."""
        most = 2 * len(self._table) + SPARE
        for calendar in (self._looks, self._deadlines):
            if len(calendar) > most:
                calendar.drop_freed()


class _Calendar:
    """Records by time, in pages of a fixed length.

    No object is created for an entry. A heap would take more interpreter steps. Its entries would also be many objects
    that live long. Every few seconds, the watchdog would then start a garbage collection of the whole process.
    """

    __slots__ = ("_numbers", "pages")

    def __init__(self) -> None:
        self.pages: dict[int, list[LocalLeaseRecord]] = {}
        #: The numbers of the pages, as a heap.
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self.pages.values()))

    def add(self, at: float, record: LocalLeaseRecord) -> None:
        """Enter a record. An earlier entry of it remains."""
        number = int(at * PAGES)
        page = self.pages.get(number)
        if page is None:
            self.pages[number] = [record]
            heapq.heappush(self._numbers, number)
        else:
            page.append(record)

    def first(self) -> tuple[int, list[LocalLeaseRecord]]:
        """Return the number and the records of the first page."""
        number = self._numbers[0]
        return number, self.pages[number]

    def replace_first(self, page: list[LocalLeaseRecord]) -> None:
        """Replace the records of the first page; without any, the page is removed."""
        if page:
            self.pages[self._numbers[0]] = page
        else:
            del self.pages[heapq.heappop(self._numbers)]

    def take(self, until: float) -> list[LocalLeaseRecord]:
        """Remove the entries up to ``until``. Return each held record among them whose ``look_at`` has come, once."""
        taken: list[LocalLeaseRecord] = []
        last = int(until * PAGES)
        while self._numbers and self._numbers[0] <= last:
            number, page = self.first()
            later: list[LocalLeaseRecord] = []
            for record in page:
                at = record.look_at
                if at > until:
                    later.append(record)
                elif at > -math.inf and record.state is LeaseState.HELD:
                    record.look_at = math.inf  # not returned again, if it has another entry
                    taken.append(record)
            # In an earlier page, entries of later looks do not count.
            self.replace_first(later if number == last else [])
            if number == last:
                break
        return taken

    def drop_freed(self) -> None:
        """Remove the entries of records that are not held."""
        held = ((number, [one for one in page if one.state is LeaseState.HELD]) for number, page in self.pages.items())
        self.pages = {number: page for number, page in held if page}
        self._numbers = sorted(self.pages)


def _latest(record: LocalLeaseRecord) -> float:
    """Return the latest time to look at a record: when half of its ttl or its ``max_hold`` is over."""
    half = record.deadline - record.ttl / 2
    return min(half, record.max_hold_until) if record.max_hold_until > 0 else half
